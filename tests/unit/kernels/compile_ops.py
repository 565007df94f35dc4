"""Compiles every kernel of the ops for an H200, no GPU needed, and prints one JSON line per kernel.

A program of its own, because the tests' process has Triton's interpreter switched on, which replaces the compiler.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ostinato.kernels import triton_elementwise, triton_logprobs, triton_sampling, triton_step
from ostinato.kernels.triton_sampling_filters import FILTER_NUM_WARPS

TARGET = GPUTarget("cuda", 90, 32)
FLOAT_POINTERS = {
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_values",
    "adjusted", "best_values", "tile_values", "chunk_values", "out_values", "cos_sin",
}  # fmt: skip
MODEL_POINTERS = {"x", "residual", "weight", "out", "q", "k", "q_weight", "k_weight", "gate_up", "logits"}
SCALARS = {
    "scratch", "size", "limit", "count", "query_len", "num_rows", "num_search_steps", "max_tokens", "max_rows",
    "num_vocab", "num_chunks", "num_tiles", "num_stop_ids", "num_biases", "ring_size",
}  # fmt: skip


def cases() -> Iterator[tuple[Any, int, dict[str, Any]]]:
    """Kernel, warps, compile-time arguments."""
    for size in (576, 2048, 4096, 8192):
        block = triton.next_power_of_2(size)
        for has_residual in (False, True):
            choices = {"SIZE": size, "BLOCK": block, "HAS_RESIDUAL": has_residual}
            yield triton_elementwise.rms_norm_kernel, triton_elementwise.norm_num_warps(block), choices
    for num_q, num_k, head_size, rotated, norm in (
        (9, 3, 64, 64, False), (32, 8, 128, 128, False), (16, 8, 128, 128, True), (16, 2, 80, 80, True),
        (16, 2, 96, 48, True), (16, 2, 256, 256, True), (16, 2, 256, 64, True),
    ):  # fmt: skip
        rest = triton.next_power_of_2(head_size - rotated) if rotated < head_size else 0
        choices = {"NUM_Q": num_q, "NUM_K": num_k, "HEAD_SIZE": head_size, "HALF": rotated // 2,
                   "HALF_PAD": triton.next_power_of_2(rotated // 2), "REST_PAD": rest,
                   "HEADS": triton_elementwise.ROPE_HEADS, "NORM": norm}  # fmt: skip
        yield triton_elementwise.rope_kernel, 4, choices
    yield triton_elementwise.silu_mul_kernel, 4, {"BLOCK": triton_elementwise.SILU_BLOCK}
    yield triton_step.prepare_kernel, 4, {"BLOCK_SIZE": 16, "TILE": triton_step.PREPARE_TILE}
    yield triton_step.embed_kernel, 4, {"SIZE": 2048, "BLOCK": triton_step.EMBED_BLOCK}
    yield triton_step.scatter_kernel, 4, {"TILE": triton_step.SCATTER_TILE}
    yield triton_step.advance_kernel, 4, {"TILE": triton_step.ADVANCE_TILE}
    yield (
        triton_sampling.chunk_kernel,
        triton_sampling.CHUNK_NUM_WARPS,
        {"STOP_PAD": 64, "BIAS_PAD": 512, "TILED": False},
    )
    yield (
        triton_sampling.chunk_kernel,
        triton_sampling.CHUNK_NUM_WARPS,
        {"STOP_PAD": 64, "BIAS_PAD": 512, "TILED": True},
    )
    for num_chunks in (12, 38, 64):
        chunks_pad = triton.next_power_of_2(num_chunks)
        untiled = {"CHUNKS_PAD": chunks_pad, "TILES_PAD": 0, "tile_values": None, "tile_ids": None}
        yield triton_sampling.pick_kernel, FILTER_NUM_WARPS, untiled
        yield triton_sampling.pick_kernel, FILTER_NUM_WARPS, {"CHUNKS_PAD": chunks_pad, "TILES_PAD": 64 * chunks_pad}
        top_pad = triton.next_power_of_2(num_chunks * 22)
        yield triton_logprobs.logprobs_merge_kernel, 8, {"CHUNKS_PAD": chunks_pad, "TOP_PAD": top_pad}
    yield triton_logprobs.logprobs_chunk_kernel, 8, {}


def argument_type(name: str, dtype: str) -> str:
    if name in MODEL_POINTERS:
        return f"*{dtype}"
    if name in FLOAT_POINTERS:
        return "*fp32"
    if name == "in_prompt":
        return "*i1"
    if name == "eps":
        return "fp32"
    return "i32" if name in SCALARS or "stride" in name else "*i32"


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local bytes (spills) of the one kernel in `cubin`."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def main() -> None:
    for kernel, num_warps, choices in cases():
        dtype = "bf16"
        if "PDL" in kernel.arg_names:
            choices = {**choices, "PDL": True}
        signature = {name: "constexpr" if name in choices else argument_type(name, dtype) for name in kernel.arg_names}
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(kernel.arg_names)
            if signature[name].startswith("*") or "stride" in name or name in ("size", "num_vocab")
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=choices, attrs=aligned)
        options = {"num_warps": num_warps, "launch_pdl": choices.get("PDL", False)}
        if kernel is triton_sampling.chunk_kernel:
            options["enable_fp_fusion"] = triton_sampling.FP_FUSION
        compiled = triton.compile(source, target=TARGET, options=options)
        report = {"kernel": kernel.__name__, "choices": choices, "shared_bytes": compiled.metadata.shared}
        report["num_fused"] = compiled.asm["ptx"].count("fma.rn.f32")
        report["waits"] = compiled.asm["ptx"].count("griddepcontrol.wait")
        print(json.dumps(report | resources(compiled.asm["cubin"])), flush=True)


if __name__ == "__main__":
    main()
