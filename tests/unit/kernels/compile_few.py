"""Compiles the few-row projections for an H200, no GPU needed, and prints a JSON line per kernel (see compile_ops)."""

from __future__ import annotations

import json
import re
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
EVENT = re.compile(r"griddepcontrol\.\w+|cp\.async\.bulk\.prefetch|(?:ld|st)\.global[\w.:]*")
# Corners of the table, each of which takes a second or more, and sizes that are not in it.
PROJECTIONS: list[tuple[Kind, int, int, int]] = [
    ("norm", 3072, 2048, 1), ("gated", 8192, 2048, 1), ("residual", 2048, 8192, 1), ("residual", 2048, 8192, 2),
    ("gated", 14336, 4096, 2), ("residual", 4096, 14336, 2), ("norm", 151936, 1024, 2), ("norm", 3072, 2048, 3),
    ("gated", 8192, 2048, 4), ("residual", 1024, 3072, 4), ("residual", 2048, 2048, 4), ("norm", 128256, 2048, 4),
    ("norm", 960, 576, 2), ("gated", 13824, 5120, 1), ("gated", 9728, 2560, 4), ("residual", 2560, 9728, 3),
]  # fmt: skip


def cases() -> Iterator[tuple[Any, dict[str, Any], FewConfig, Kind]]:
    """Kernel, compile-time arguments, config, kind."""
    for kind, num_out, size, num_rows in PROJECTIONS:
        config = few_config(kind, num_out, size, num_rows)
        choices: dict[str, Any] = {"SIZE": size, "T": num_rows, "HAS_BIAS": num_rows == 2, "PDL": True}
        choices["LANES"] = 32 * config.num_warps
        choices |= config.tile()
        if num_rows != 2:
            choices["bias"] = None
        norm = kind != "residual"
        if config.dot:
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
        report = {
            "kernel": kernel.__name__,
            "kind": kind,
            "choices": choices,
            "shared_bytes": compiled.metadata.shared,
            "num_threads": 32 * config.num_warps,
            "events": EVENT.findall(compiled.asm["ptx"]),
        }
        print(json.dumps(report | resources(compiled.asm["cubin"])), flush=True)


if __name__ == "__main__":
    main()
