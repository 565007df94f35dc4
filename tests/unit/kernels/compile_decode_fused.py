"""Compiles the fused decode kernels for an H200, no GPU needed; prints one JSON line per kernel (see compile_ops)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import triton
from compile_ops import TARGET, resources
from triton.compiler import ASTSource

from ostinato.kernels.triton_decode_fused import decode_fused_kernel, fused_config
from ostinato.kernels.triton_decode_split import merge_kernel

MODEL_POINTERS = {"q", "k", "v", "q_weight", "k_weight", "k_cache", "v_cache", "out"}
FLOAT_POINTERS = {"cos_sin", "partial_acc", "partial_lse"}
SCALARS = {"num_splits", "table_width"}
# Head size, query heads per key head, query length, qk-norm, several splits, merged in the kernel, programmatic launch.
# A few corners: each takes seconds.
SHAPES: list[tuple[int, int, int, bool, bool, bool, bool]] = [
    (64, 4, 1, False, False, False, False),
    (64, 4, 1, False, True, True, True),
    (128, 4, 1, False, True, True, False),
    (128, 4, 1, False, True, True, True),
    (128, 2, 1, True, True, True, True),
    (128, 4, 8, True, True, True, True),
    (256, 8, 1, False, True, True, False),
    (256, 4, 1, True, True, True, True),
    (128, 16, 4, False, True, False, True),
]
ELEMENT_SIZE = 2


def cases() -> Iterator[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Kernel, compile-time arguments, launch options."""
    for head_size, group, query_len, norm, split, merge, pdl in SHAPES:
        config = fused_config(query_len, group, head_size, head_size // 2, ELEMENT_SIZE)
        tiles = config.tiles
        shape = {
            "QUERY_LEN": query_len, "QUERY_PAD": config.query_pad, "GROUP": group, "HEAD_SIZE": head_size,
            "HEAD_PAD": tiles.head_pad, "BLOCK_SIZE": 16, "TILE": tiles.tile, "LIVE_PAD": config.live_pad,
            "CHUNK": config.chunk, "PDL": pdl,
        }  # fmt: skip
        own = {
            "NEW_PAD": config.new_pad, "HALF": head_size // 2, "VECTOR": config.vector, "NORM": norm,
            "NUM_QUERIES": tiles.num_queries, "SPLIT": split, "MERGE": merge, "NATIVE": True,
        }  # fmt: skip
        options = {"num_warps": tiles.num_warps, "launch_pdl": pdl}
        yield decode_fused_kernel, shape | own, options | {"num_stages": tiles.num_stages}
        if split and not merge:
            yield merge_kernel, shape, options


def argument_type(name: str) -> str:
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
        signature = {name: "constexpr" if name in choices else argument_type(name) for name in names}
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
            "shared_bytes": compiled.metadata.shared,
            "copies_ahead": ptx.count("cp.async.cg"),
            "waits": ptx.count("griddepcontrol.wait"),
            "prefetches": ptx.count("prefetch.global.L2"),
            "ordered_counts": ptx.count("atom.global.gpu.acq_rel"),
        }
        print(json.dumps(report | resources(compiled.asm["cubin"])), flush=True)


if __name__ == "__main__":
    main()
