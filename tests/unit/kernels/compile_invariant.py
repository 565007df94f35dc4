"""Compiles the batch-invariant product for an H200, no GPU needed, and prints one JSON line each (see compile_ops).
The attention kernel is among compile_attention's."""

from __future__ import annotations

import json

import triton
from compile_ops import TARGET, resources
from triton.compiler import ASTSource

from ostinato.kernels.triton_invariant import invariant_linear_kernel, linear_config

CASES = [("bf16", 2048, True), ("bf16", 720, False), ("bf16", 1001, True), ("fp16", 2048, True), ("fp32", 720, True)]
"""Dtype, K, and whether there is a bias: K is a multiple of the tile, ends inside one, or is odd."""


def main() -> None:
    for dtype, size, has_bias in CASES:
        config = linear_config(4 if dtype == "fp32" else 2)
        choices = {"SIZE": size, **config.tile(), "HAS_BIAS": has_bias, "PDL": True}
        if not has_bias:
            choices["bias"] = None
        names = invariant_linear_kernel.arg_names
        pointers = {"x", "weight", "bias", "out"}
        signature = {
            name: "constexpr" if name in choices else f"*{dtype}" if name in pointers else "i32" for name in names
        }
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if signature[name].startswith("*") or (size % 16 == 0 and "stride" in name)
        }
        source = ASTSource(fn=invariant_linear_kernel, signature=signature, constexprs=choices, attrs=aligned)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "launch_pdl": True}
        compiled = triton.compile(source, target=TARGET, options=options)
        report = {
            "kernel": invariant_linear_kernel.__name__,
            "dtype": dtype,
            "choices": choices,
            "shared_bytes": compiled.metadata.shared,
            "warpgroup_products": "wgmma" in compiled.asm["ptx"],
            "waits": compiled.asm["ptx"].count("griddepcontrol.wait"),
        }
        print(json.dumps(report | resources(compiled.asm["cubin"])), flush=True)


if __name__ == "__main__":
    main()
