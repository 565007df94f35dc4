"""Compiles the products of some rows for an H200, no GPU needed; prints a JSON line per kernel (see compile_ops)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import triton
from compile_ops import TARGET, resources
from triton.compiler import ASTSource

from ostinato.kernels.small_configs import Kind, small_config
from ostinato.kernels.triton_elementwise import norm_num_warps
from ostinato.kernels.triton_small import add_parts_kernel
from ostinato.kernels.triton_small_gemm import compile_time, small_gemm_kernel

EVENT = re.compile(r"griddepcontrol\.\w+|cp\.async\.bulk\.prefetch|cp\.async\.c[ag]|(?:ld|st|red|atom)\.global[\w.:]*")
# Corners of the table, each of which takes a second or more, and sizes that are not in it.
PRODUCTS: list[tuple[Kind, int, int, int]] = [
    ("plain", 4096, 1024, 8), ("plain", 3072, 2048, 32), ("plain", 4096, 1024, 256), ("plain", 128256, 2048, 64),
    ("gated", 3072, 1024, 8), ("gated", 14336, 4096, 16), ("gated", 8192, 2048, 32), ("gated", 14336, 4096, 128),
    ("parts", 1024, 2048, 8), ("parts", 1024, 3072, 64), ("parts", 2048, 8192, 128), ("parts", 2048, 8192, 256),
    ("plain", 960, 576, 32), ("plain", 49152, 576, 64), ("gated", 9728, 2560, 64), ("parts", 2560, 9728, 16),
    ("parts", 576, 1536, 64),
]  # fmt: skip
ALIGNED = {"num_out", "size", "part_size", "x_stride", "out_stride", "residual_stride"}


def cases() -> Iterator[tuple[Any, str, dict[str, Any], int]]:
    """Kernel, kind, compile-time arguments, warps."""
    for index, (kind, num_out, size, num_rows) in enumerate(PRODUCTS):
        config = small_config(kind, num_out, size, num_rows)
        assert config is not None, (kind, num_out, size, num_rows)
        choices = compile_time(config, num_out, size, config.num_parts, aligned=True)
        choices |= {"GATED": kind == "gated", "HAS_BIAS": index % 3 == 1, "PDL": True}
        yield small_gemm_kernel, kind, choices if index % 3 == 1 else choices | {"bias": None}, config.num_warps
    for size, parts in ((1024, 8), (4096, 2)):
        block = triton.next_power_of_2(size)
        choices = {"SIZE": size, "BLOCK": block, "PARTS": parts, "PDL": True}
        yield add_parts_kernel, "norm", choices | {"NORM": True}, norm_num_warps(block)
        yield add_parts_kernel, "sum", choices | {"NORM": False, "weight": None, "out": None}, norm_num_warps(block)


def argument_type(name: str, kind: str) -> str:
    if name == "parts" or (name == "out" and kind == "parts"):
        return "*fp32"
    if name in ("x", "weight", "bias", "out", "residual"):
        return "*bf16"
    return "fp32" if name == "eps" else "i32"


def main() -> None:
    for kernel, kind, choices, num_warps in cases():
        names = kernel.arg_names
        signature = {name: "constexpr" if name in choices else argument_type(name, kind) for name in names}
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if signature[name].startswith("*") or name in ALIGNED
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=choices, attrs=aligned)
        compiled = triton.compile(source, target=TARGET, options={"num_warps": num_warps, "launch_pdl": True})
        report = {
            "kernel": kernel.__name__,
            "kind": kind,
            "choices": choices,
            "shared_bytes": compiled.metadata.shared,
            "num_threads": 32 * num_warps,
            "events": EVENT.findall(compiled.asm["ptx"]),
        }
        print(json.dumps(report | resources(compiled.asm["cubin"])), flush=True)


if __name__ == "__main__":
    main()
