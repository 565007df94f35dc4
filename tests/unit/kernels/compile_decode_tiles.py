"""Compiles the kernels around lists of rows and tiles for an H200, no GPU needed; prints one JSON line per kernel (see
compile_ops)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import triton
from compile_ops import TARGET, resources
from triton.compiler import ASTSource

from ostinato.kernels.decode_tiles import tile_config, tile_unit
from ostinato.kernels.triton_decode_tiles import attend_tiles_kernel, merged_at_a_time, plan_tiles_kernel
from ostinato.kernels.triton_flash_rows import PLAN_FLASH_CHUNK, plan_flash_kernel
from ostinato.kernels.triton_rope_write import rope_write_kernel

MODEL_POINTERS = {"q", "k", "v", "q_weight", "k_weight", "out"}
CACHES = {"k_cache", "v_cache"}
FLOAT_POINTERS = {"cos_sin", "partial_acc", "partial_lse", "kv_scales"}
SCALARS = {"num_rows", "num_tokens", "table_width", "block_cells"}
BLOCK_SIZE = 16
ELEMENT_SIZE = 2
# Head size, query heads per key head, of a ragged step. A few corners: each takes seconds.
ATTENTION = [
    (64, 4, False),
    (64, 2, True),
    (80, 2, False),
    (128, 2, False),
    (128, 4, False),
    (128, 8, True),
    (256, 8, False),
]
# Query heads, key heads, head size, how much of that turns, qk-norm.
ROPE = [(32, 8, 64, 64, False), (16, 8, 128, 128, True), (16, 2, 96, 48, True), (16, 2, 256, 64, False)]


def cases() -> Iterator[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Kernel, compile-time arguments, launch options. SCALED: a cache in FP8 with scales, else in bfloat16."""
    for head_size, group, ragged in ATTENTION:
        for scaled in (False, True):
            config = tile_config(head_size, ELEMENT_SIZE, 1 if scaled else ELEMENT_SIZE)
            width, live_pad, tile = triton.next_power_of_2(head_size), triton.next_power_of_2(group), config.tile
            choices = {
                "GROUP": group, "HEAD_SIZE": head_size, "HEAD_PAD": width, "NUM_QUERIES": 16, "LIVE_PAD": live_pad,
                "CHUNK": merged_at_a_time(live_pad, width), "TILE": tile, "UNIT": tile_unit(tile, BLOCK_SIZE),
                "STAGES": config.num_stages, "SCALED": scaled, "NATIVE": True, "RAGGED": ragged, "PDL": not ragged,
            }  # fmt: skip
            yield (
                attend_tiles_kernel,
                choices,
                {"num_warps": config.num_warps, "launch_pdl": not ragged, "maxnreg": config.max_registers},
            )
    for tile, ragged in ((64, False), (32, True)):
        choices = {"BLOCK_SIZE": BLOCK_SIZE, "TILE": tile, "UNIT": tile_unit(tile, BLOCK_SIZE), "RAGGED": ragged,
                   "ROWS": 512, "CHUNK": 32}  # fmt: skip
        yield plan_tiles_kernel, choices, {"num_warps": 4}
    for singles in (True, False):
        choices = {"BLOCK_SIZE": BLOCK_SIZE, "SINGLES": singles, "CHUNK": PLAN_FLASH_CHUNK}
        yield plan_flash_kernel, choices, {"num_warps": 4}
    for num_q, num_kv, head_size, rotated, norm in ROPE:
        for scaled in (False, True):
            rest = triton.next_power_of_2(head_size - rotated) if rotated < head_size else 0
            choices = {
                "NUM_Q": num_q, "NUM_KV": num_kv, "HEAD_SIZE": head_size, "HEAD_PAD": triton.next_power_of_2(head_size),
                "HALF": rotated // 2, "HALF_PAD": triton.next_power_of_2(rotated // 2), "REST_PAD": rest, "HEADS": 4,
                "NORM": norm, "BLOCK_SIZE": BLOCK_SIZE, "SCALED": scaled, "PDL": True,
            }  # fmt: skip
            yield rope_write_kernel, choices, {"num_warps": 4, "launch_pdl": True}


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


def before_wait(text: str) -> str:
    """Of each path: the compiler gives a program without a share a basic block with a wait of its own."""
    first, *others = text.split("griddepcontrol.wait")
    blocks = [re.split(r"^\$L__BB", other, flags=re.MULTILINE)[-1] for other in others[:-1]]
    return "\n".join([first, *blocks]) if others else ""


def main() -> None:
    for kernel, choices, options in cases():
        names = kernel.arg_names
        scaled = choices.get("SCALED", False)
        signature = {name: "constexpr" if name in choices else argument_type(name, scaled) for name in names}
        aligned = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if signature[name].startswith("*") or "stride" in name
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=choices, attrs=aligned)
        compiled = triton.compile(source, target=TARGET, options=options)
        ptx, layouts = compiled.asm["ptx"], compiled.asm["ttgir"]
        tile = f"{choices.get('TILE')}x{choices.get('HEAD_PAD')}x"
        report = {
            "kernel": kernel.__name__,
            "choices": choices,
            "num_warps": options["num_warps"],
            "shared_bytes": compiled.metadata.shared,
            "tile_buffers": [int(n) for n in re.findall(rf"local_alloc : \(\) -> !ttg.memdesc<(\d+)x{tile}", layouts)],
            "copies_ahead": ptx.count("cp.async.cg"),
            "waits": ptx.count("griddepcontrol.wait"),
            "early_writes": len(re.findall(r"\b(?:st|atom|red|cp\.async)\.\S*", before_wait(ptx))),
            "early_loads": re.findall(r"tt\.load .*ptr<(\w+)>", before_wait(layouts)),
            "num_early_loads": len(re.findall(r"\bld\.global", before_wait(ptx))),
            "ordered_counts": ptx.count("atom.global.gpu.acq_rel"),
        }
        print(json.dumps(report | resources(compiled.asm["cubin"])), flush=True)


if __name__ == "__main__":
    main()
