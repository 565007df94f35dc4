"""Compiles heads that choose tokens for an H200, no GPU needed; prints a JSON line per kernel (see compile_ops)."""

from __future__ import annotations

import json
from dataclasses import replace

import triton
from compile_ops import TARGET, argument_type, resources
from compile_small import EVENT
from triton.compiler import ASTSource

from ostinato.kernels.small_configs import small_config
from ostinato.kernels.triton_sampling import FP_FUSION
from ostinato.kernels.triton_small_gemm import compile_time
from ostinato.kernels.triton_small_head import head_kernel

# The tilings of the heads' products: what a tuner begins with.
HEADS = [
    (128256, 2048, 8), (128256, 2048, 64), (128256, 4096, 32), (128256, 4096, 64), (151936, 1024, 16), (49152, 576, 64),
    (50257, 1024, 8),
]  # fmt: skip
ALIGNED = {"num_vocab", "size", "x_stride", "logits_stride"}


def main() -> None:
    for num_vocab, size, num_rows in HEADS:
        config = small_config("plain", num_vocab // 16 * 16, size, num_rows)
        assert config is not None, (num_vocab, size, num_rows)
        if config.block_m * config.block_n >= 64 * 128:
            config = replace(config, num_warps=8)  # with 4 the noise of the tile spills
        choices = compile_time(config, num_vocab, size, 1, aligned=True) | {"PDL": True}
        names = head_kernel.arg_names
        signature = {name: "constexpr" if name in choices else argument_type(name, "bf16") for name in names}
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if signature[name].startswith("*") or (name in ALIGNED and (num_vocab % 16 == 0 or name != "num_vocab"))
        }
        source = ASTSource(fn=head_kernel, signature=signature, constexprs=choices, attrs=aligned)
        options = {"num_warps": config.num_warps, "launch_pdl": True, "enable_fp_fusion": FP_FUSION}
        compiled = triton.compile(source, target=TARGET, options=options)
        report = {
            "shape": (num_vocab, size, num_rows),
            "choices": choices,
            "shared_bytes": compiled.metadata.shared,
            "num_threads": 32 * config.num_warps,
            "events": EVENT.findall(compiled.asm["ptx"]),
            "num_fused": compiled.asm["ptx"].count("fma.rn.f32"),
        }
        print(json.dumps(report | resources(compiled.asm["cubin"])), flush=True)


if __name__ == "__main__":
    main()
