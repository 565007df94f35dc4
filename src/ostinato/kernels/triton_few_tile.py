"""What the kernels of the few-row projections share: how weights are read, and SwiGLU's product. See `triton_few`."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_weights", "prefetch_weights", "swiglu"]

LINE_BYTES = tl.constexpr(128)


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
def prefetch_weights(weight, first_row, num_rows, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, LINES: tl.constexpr):
    """Asks for the same rows in L2. LINES: a power of two not below the number of cache lines."""
    LINE: tl.constexpr = LINE_BYTES // (weight.dtype.element_ty.primitive_bitwidth // 8)
    offsets = first_row.to(tl.int64) * SIZE + tl.minimum(tl.arange(0, LINES) * LINE, BLOCK_N * SIZE - 1)
    last = tl.cast(num_rows, tl.int64) * SIZE - 1
    addresses = (weight + tl.minimum(offsets, last)).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up, silu rounded to the operands' type."""
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * up
