"""Compiles the attention kernels for an H200, no GPU needed, and prints one JSON line per kernel (see compile_ops)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import triton
from compile_ops import TARGET, resources
from triton.compiler import ASTSource

from ostinato.kernels.triton_attention_decode import combine_kernel, decode_config, decode_kernel
from ostinato.kernels.triton_attention_prefill import prefill_config, prefill_kernel
from ostinato.kernels.triton_gather import gather_blocks_kernel, gather_chunk
from ostinato.kernels.triton_kv_write import kv_write_kernel

MODEL_POINTERS = {"q", "k", "v", "out"}
CACHES = {"k_cache", "v_cache"}
SCALARS = {"num_tokens", "num_rows", "num_splits", "table_width"}
# Head size, query heads per key head, (query length, split or not). A few corners: each takes a second or more.
SHAPES: list[tuple[int, int, list[tuple[int, bool]]]] = [
    (64, 3, [(1, False), (1, True)]),
    (128, 4, [(1, False), (1, True), (8, True)]),
    (128, 16, [(8, True)]),
    (256, 8, [(1, True)]),
]
ELEMENT_SIZE = 2
SCALED = (False, True)
"""A cache in the model's bfloat16, or in FP8 with scales."""


def cases() -> Iterator[tuple[Any, dict[str, Any], int, int]]:
    """Kernel, compile-time arguments, warps, stages."""
    for head_size, group, variants in SHAPES:
        shape = {"GROUP": group, "HEAD_SIZE": head_size, "BLOCK_SIZE": 16}
        for query_len, split in variants:
            config = decode_config(query_len, group, head_size, ELEMENT_SIZE)
            choices = {**shape, **tile_choices(config), "QUERY_LEN": query_len, "SPLIT": split}
            for scaled in SCALED:
                yield decode_kernel, {**choices, "SCALED": scaled}, config.num_warps, config.num_stages
        for scaled in SCALED:
            ragged = prefill_config(head_size, ELEMENT_SIZE, scaled)
            choices = {
                **shape,
                **tile_choices(ragged),
                "INVARIANT": head_size == 256,
                "SCALED": scaled,
                "SINGLES": scaled,
            }
            yield prefill_kernel, choices, ragged.num_warps, ragged.num_stages
    padded = {"HEAD_SIZE": 128, "HEAD_PAD": 128}
    yield combine_kernel, {**padded, "SPLITS_PAD": 128, "CHUNK": 16}, 4, 3
    for scaled in SCALED:
        choices = {**padded, "NUM_HEADS": 8, "HEADS_PAD": 8, "BLOCK_SIZE": 16, "PDL": True, "SCALED": scaled}
        yield kv_write_kernel, choices, 4, 3
    for scaled, num_heads, head_size in ((False, 8, 128), (True, 8, 128), (False, 3, 80)):
        size = 16 * num_heads * head_size
        chunk = gather_chunk(size, 1 if scaled else ELEMENT_SIZE)
        bits = {"BITS": "*u8" if scaled else "*i16"}
        yield gather_blocks_kernel, {"BLOCK_SIZE": 16, "SIZE": size, "CHUNK": chunk, "PDL": True} | bits, 4, 3


def tile_choices(config: Any) -> dict[str, int]:
    fields = dataclasses.asdict(config)
    return {name.upper(): fields[name] for name in ("num_queries", "head_pad", "tile")}


def argument_type(name: str, scaled: bool, bits: str | None = None) -> str:
    if bits is not None and name in CACHES | {"keys", "values"}:
        return bits
    if name in CACHES:
        return "*fp8e4nv" if scaled else "*bf16"
    if name == "kv_scales":
        return "*fp32"
    if name in MODEL_POINTERS:
        return "*bf16"
    if name.startswith("partial"):
        return "*fp32"
    if name == "scale":
        return "fp32"
    return "i32" if name in SCALARS or "stride" in name else "*i32"


def main() -> None:
    for kernel, choices, num_warps, num_stages in cases():
        bits = choices.pop("BITS", None)  # of a kernel that copies whatever the type
        names = kernel.arg_names
        signature = {
            name: "constexpr" if name in choices else argument_type(name, choices.get("SCALED", False), bits)
            for name in names
        }
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if signature[name].startswith("*") or "stride" in name
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=choices, attrs=aligned)
        options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": choices.get("PDL", False)}
        compiled = triton.compile(source, target=TARGET, options=options)
        report = {
            "kernel": kernel.__name__,
            "choices": choices,
            "num_warps": num_warps,
            "shared_bytes": compiled.metadata.shared,
            "warpgroup_products": "wgmma" in compiled.asm["ptx"],
        }
        print(json.dumps(report | resources(compiled.asm["cubin"])), flush=True)


if __name__ == "__main__":
    main()
