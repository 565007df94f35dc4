"""Compiles the few-row projections for an H200, no GPU needed, and prints one JSON line per kernel (see compile_ops)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import triton
from compile_ops import TARGET, resources
from triton.compiler import ASTSource

from ostinato.kernels.few_configs import FewConfig, Kind, few_config
from ostinato.kernels.triton_few_dot import dot_kernel
from ostinato.kernels.triton_few_fma import linear_residual_kernel, norm_linear_kernel

MODEL_POINTERS = {"residual", "norm_weight", "weight", "bias", "out", "x"}
ELEMENT_SIZE = 2
# A few corners of the table, each of which takes a second or more, and sizes that are not in it.
PROJECTIONS: list[tuple[Kind, int, int]] = [
    ("norm", 3072, 2048), ("gated", 8192, 2048), ("residual", 2048, 8192), ("gated", 14336, 4096),
    ("residual", 4096, 14336), ("residual", 1024, 3072), ("norm", 960, 576), ("gated", 13824, 5120),
    ("residual", 5120, 13824),
]  # fmt: skip
NUM_ROWS = (1, 2, 4, 8)


def cases() -> Iterator[tuple[Any, dict[str, Any], FewConfig, Kind]]:
    """Kernel, compile-time arguments, config, kind."""
    for index, (kind, num_out, size) in enumerate(PROJECTIONS):
        for num_rows in NUM_ROWS if index < 3 else NUM_ROWS[:: index % 3 + 1]:
            config = few_config(kind, num_out, size, num_rows)
            choices: dict[str, Any] = {"SIZE": size, "T": num_rows, "HAS_BIAS": num_rows == 2, "PDL": True}
            choices |= config.tile(size, ELEMENT_SIZE)
            if num_rows != 2:
                choices["bias"] = None
            if config.dot:
                norm = kind != "residual"
                choices |= {"NORM": norm, "GATED": kind == "gated", "ADD": not norm}
                yield dot_kernel, choices if norm else choices | {"norm_weight": None}, config, kind
            elif kind == "residual":
                yield linear_residual_kernel, choices, config, kind
            else:
                yield norm_linear_kernel, choices | {"GATED": kind == "gated"}, config, kind


def argument_type(name: str) -> str:
    if name in MODEL_POINTERS:
        return "*bf16"
    return "fp32" if name == "eps" else "i32"


def main() -> None:
    for kernel, choices, config, kind in cases():
        signature = {name: "constexpr" if name in choices else argument_type(name) for name in kernel.arg_names}
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(kernel.arg_names)
            if signature[name].startswith("*") or "stride" in name or name == "num_out"
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=choices, attrs=aligned)
        compiled = triton.compile(source, target=TARGET, options={"num_warps": config.num_warps, "num_stages": 1})
        ptx = compiled.asm["ptx"]
        report = {
            "kernel": kernel.__name__,
            "kind": kind,
            "choices": choices,
            "shared_bytes": compiled.metadata.shared,
            "num_threads": 32 * config.num_warps,
            "programs_per_sm": config.programs_per_sm,
            "loads_before_wait": ptx.split("griddepcontrol.wait")[0].count("ld.global"),
            "order": ["launch" in word for word in ptx.split("griddepcontrol.")[1:]],
            "wide_loads": ptx.count("ld.global.L1::evict_first") - ptx.count(".v4.b32"),
        }
        print(json.dumps(report | resources(compiled.asm["cubin"])), flush=True)


if __name__ == "__main__":
    main()
