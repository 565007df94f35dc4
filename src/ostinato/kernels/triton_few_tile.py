"""What the kernels of the few-row projections share: how weights are read, and SwiGLU's product. See `triton_few`."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_weights", "prefetch_weights", "swiglu"]

PREFETCH_BYTES = tl.constexpr(1024)


@triton.jit
def load_weights(weight, first_row, num_rows, columns, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    """Rows [first_row, first_row + BLOCK_N) of a weight [num_rows, SIZE], zeros outside: [BLOCK_N, len(columns)]."""
    rows = first_row + tl.arange(0, BLOCK_N)
    inside = (rows < num_rows)[:, None]
    if MASKED:
        inside = inside & (columns < SIZE)[None, :]
    pointers = weight + rows[:, None].to(tl.int64) * SIZE + columns[None, :]
    return tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def prefetch_weights(
    weight, first_row, num_rows, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Asks for rows [first_row, first_row + BLOCK_N) of a weight [num_rows, SIZE] in L2: whole kilobytes, a thread
    each. Bulk prefetches want 16-byte boundaries; rows without them are not asked for."""
    ROW: tl.constexpr = SIZE * (weight.dtype.element_ty.primitive_bitwidth // 8)
    if ROW % 16 == 0:
        num_bytes = tl.minimum(tl.maximum(num_rows - first_row, 0), BLOCK_N) * ROW
        base = (weight + first_row.to(tl.int64) * SIZE).to(tl.int64)
        for chunk in tl.range(0, num_bytes // PREFETCH_BYTES, LANES):
            offset = (chunk + tl.arange(0, LANES)) * PREFETCH_BYTES
            asked = (offset + PREFETCH_BYTES <= num_bytes).to(tl.int32)
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], 1024; } // $0",
                "=r,l,r", [base + offset, asked], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up, silu rounded to the operands' type."""
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up
