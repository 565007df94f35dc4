"""What the kernels of the few-row projections share: how weights are read, and SwiGLU's product. See `triton_few`."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_weights", "prefetch_ahead", "prefetch_weights", "swiglu"]

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
def _prefetch_span(pointer, num_bytes, first, step, LANES: tl.constexpr):
    """Asks for whole chunks of `num_bytes` from a pointer, aligned to 16 bytes, on in L2; a thread a chunk."""
    base = pointer.to(tl.int64)
    for chunk in tl.range(first * LANES, num_bytes // PREFETCH_BYTES, step * LANES):
        offset = (chunk + tl.arange(0, LANES)).to(tl.int64) * PREFETCH_BYTES
        asked = (offset < num_bytes).to(tl.int32)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], 1024; mov.b32 $0, 0; }",
            "=r,l,r", [base + offset, asked], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def prefetch_weights(
    weight, first_row, num_rows, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Asks for rows [first_row, first_row + BLOCK_N) of a weight [num_rows, SIZE] in L2."""
    ROW: tl.constexpr = SIZE * (weight.dtype.element_ty.primitive_bitwidth // 8)
    if ROW % 16 == 0:
        rows = tl.minimum(tl.maximum(num_rows - first_row, 0), BLOCK_N)
        _prefetch_span(weight + first_row.to(tl.int64) * SIZE, rows * ROW, 0, 1, LANES)


@triton.jit
def prefetch_ahead(ahead, num_bytes, LANES: tl.constexpr):
    """Asks for the beginning of a tensor in L2, shared out among all programs."""
    _prefetch_span(ahead, num_bytes, tl.program_id(0), tl.num_programs(0), LANES)


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up, silu rounded to the operands' type."""
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up
