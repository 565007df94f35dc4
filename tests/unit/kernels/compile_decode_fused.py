"""Compiles the fused decode kernels for an H200, no GPU needed; prints one JSON line per kernel (see compile_ops)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import triton
from compile_ops import TARGET, resources
from triton.compiler import ASTSource

from ostinato.kernels.triton_decode_fused import decode_fused_kernel, fused_config

MODEL_POINTERS = {"q", "k", "v", "q_weight", "k_weight", "out"}
CACHES = {"k_cache", "v_cache"}
FLOAT_POINTERS = {"cos_sin", "partial_acc", "partial_lse", "kv_scales"}
SCALARS = {"table_width"}
# Head size, query heads per key head, qk-norm, several splits, programmatic launch. A few corners: each takes seconds.
SHAPES: list[tuple[int, int, bool, bool, bool]] = [
    (64, 4, False, False, False),
    (64, 4, False, True, True),
    (128, 4, False, False, True),
    (128, 2, True, False, True),
    (128, 4, False, True, True),
    (128, 2, True, True, True),
    (256, 8, False, True, False),
    (256, 4, True, True, True),
    (128, 16, False, True, True),
]
ELEMENT_SIZE = 2


def cases() -> Iterator[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Kernel, compile-time arguments, launch options."""
    for head_size, group, norm, split, pdl in SHAPES:
        num_rows = 1 if split else 64
        for scaled in (False, True):  # a cache in the model's bfloat16, or in FP8 with scales
            config = fused_config(num_rows, group, head_size, head_size // 2, ELEMENT_SIZE, norm)
            tiles = config.tiles
            shape = {
                "GROUP": group, "HEAD_SIZE": head_size, "HEAD_PAD": tiles.head_pad, "HALF": head_size // 2,
                "VECTOR": config.vector, "NORM": norm, "BLOCK_SIZE": 16, "NUM_QUERIES": tiles.num_queries,
                "TILE": tiles.tile, "LIVE_PAD": config.live_pad, "CHUNK": config.chunk,
                "SPLIT": split, "SCALED": scaled, "NATIVE": True, "PDL": pdl,
            }  # fmt: skip
            options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": pdl}
            yield decode_fused_kernel, shape, options


def argument_type(name: str, scaled: bool) -> str:
    if name in CACHES:
        return "*fp8e4nv" if scaled else "*bf16"
    if name in MODEL_POINTERS:
        return "*bf16"
    if name in FLOAT_POINTERS:
        return "*fp32"
    if name in ("scale", "eps"):
        return "fp32"
    return "i32" if name in SCALARS or "stride" in name else "*i32"


def main() -> None:
    for kernel, choices, options in cases():
        names = kernel.arg_names
        signature = {name: "constexpr" if name in choices else argument_type(name, choices["SCALED"]) for name in names}
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if signature[name].startswith("*") or "stride" in name
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=choices, attrs=aligned)
        compiled = triton.compile(source, target=TARGET, options=options)
        ptx = compiled.asm["ptx"]
        report = {
            "kernel": kernel.__name__,
            "choices": choices,
            "num_warps": options["num_warps"],
            "num_stages": options["num_stages"],
            "shared_bytes": compiled.metadata.shared,
            "copies_ahead": ptx.count("cp.async.cg"),
            "waits": ptx.count("griddepcontrol.wait"),
            "prefetches": ptx.count("prefetch.global.L2"),
            "ordered_counts": ptx.count("atom.global.gpu.acq_rel"),
        }
        print(json.dumps(report | resources(compiled.asm["cubin"])), flush=True)


if __name__ == "__main__":
    main()
