"""The fused projections for three or four rows, on tensor cores. See `triton_few`.

A matrix instruction multiplies 16 rows of weights with 8 columns, of which as many are used as there are rows, so that
the arithmetic does not grow with the rows, as `triton_few_fma`'s does. But the weights have to go through shared memory
to get into its layout. Each warp owns a part of a tile's inputs (the batch dimension of the dots); what the warps found
is added up once per block of outputs.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# A tuple that grows in an unrolled loop changes its type.
# mypy: disable-error-code="assignment,var-annotated"
# ruff: noqa: RUF005 (inside a kernel Triton knows `a + (b,)` but not `(*a, b)`)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.kernels.triton_few_tile import prefetch_weights, swiglu

__all__ = ["dot_kernel"]

COLUMNS = tl.constexpr(8)
"""Of the matrix instruction: the most rows that the kernel could take."""


@triton.jit
def _inputs(first, SPLIT: tl.constexpr, WIDTH: tl.constexpr):
    """Indices of a tile's inputs from `first` on, WIDTH for each warp: [SPLIT, 1, WIDTH]."""
    return first + WIDTH * tl.arange(0, SPLIT)[:, None, None] + tl.arange(0, WIDTH)[None, None, :]


@triton.jit
def _load_tile(
    weight,
    first_row,
    num_rows,
    first_input,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Part of BLOCK_N rows of a weight [num_rows, SIZE], zeros outside: [SPLIT, BLOCK_N, WIDTH]."""
    rows = first_row + tl.arange(0, BLOCK_N)[None, :, None]
    inputs = _inputs(first_input, SPLIT, WIDTH)
    inside = rows < num_rows
    if SIZE % (SPLIT * WIDTH) != 0:
        inside = inside & (inputs < SIZE)
    return tl.load(weight + rows.to(tl.int64) * SIZE + inputs, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_rows(x, x_stride, first_input, SIZE: tl.constexpr, T: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr):
    """The same inputs of all T rows: [SPLIT, COLUMNS, WIDTH], zeros outside."""
    rows = tl.arange(0, COLUMNS)[None, :, None]
    inputs = _inputs(first_input, SPLIT, WIDTH)
    return tl.load(x + rows * x_stride + inputs, mask=(rows < T) & (inputs < SIZE), other=0.0)


@triton.jit
def _finish(acc, bias, outputs, num_out, HAS_BIAS: tl.constexpr):
    """The warps' sums [SPLIT, BLOCK_N, COLUMNS] added up, and the bias: [BLOCK_N, COLUMNS]."""
    total = tl.sum(acc, 0)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=outputs < num_out, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["prefetch"])
def dot_kernel(
    x,
    norm_weight,
    weight,
    bias,
    out,
    eps,
    num_out,
    x_stride,
    out_stride,
    prefetch,
    SIZE: tl.constexpr,
    T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (programs,). A linear of `x [T, SIZE]` to `out [T, num_out]`. NORM: of the RMSNorm of x; GATED: the weight
    has 2 num_out rows, the gate's first, and the output is silu(gate) * up; ADD: it is added to what `out` holds.
    """
    BLOCK_K: tl.constexpr = SPLIT * WIDTH
    NUM_TILES: tl.constexpr = (SIZE + BLOCK_K - 1) // BLOCK_K
    first = tl.program_id(0) * BLOCK_N
    stride = tl.num_programs(0) * BLOCK_N
    up_weight = weight + tl.cast(num_out, tl.int64) * SIZE
    if PDL:
        gdc_launch_dependents()
    tile = _load_tile(weight, first, num_out, 0, SIZE, BLOCK_N, SPLIT, WIDTH)
    if GATED:
        up_tile = _load_tile(up_weight, first, num_out, 0, SIZE, BLOCK_N, SPLIT, WIDTH)
    if PDL:
        for block in tl.range(0, prefetch):
            prefetch_weights(weight, first + block * stride, num_out, SIZE, BLOCK_N, LANES)
            if GATED:
                prefetch_weights(up_weight, first + block * stride, num_out, SIZE, BLOCK_N, LANES)
        gdc_wait()

    if NORM:
        loaded = ()
        squares = tl.zeros((1, COLUMNS, 1), tl.float32)
        for c in tl.static_range(NUM_TILES):
            value = _load_rows(x, x_stride, c * BLOCK_K, SIZE, T, SPLIT, WIDTH)
            wide = value.to(tl.float32)
            squares += tl.sum(tl.sum(wide * wide, 2, keep_dims=True), 0, keep_dims=True)
            loaded = loaded + (value,)
        inverse_rms = tl.rsqrt(squares / SIZE + eps)
        normed = ()
        for c in tl.static_range(NUM_TILES):
            inputs = _inputs(c * BLOCK_K, SPLIT, WIDTH)
            scale = tl.load(norm_weight + inputs, mask=inputs < SIZE, other=0.0)
            rounded = (loaded[c].to(tl.float32) * inverse_rms).to(loaded[c].dtype)
            normed = normed + (tl.trans((scale * rounded).to(rounded.dtype), 0, 2, 1),)

    for start in tl.range(first, num_out, stride):
        outputs = start + tl.arange(0, BLOCK_N)[:, None]
        rows = tl.arange(0, COLUMNS)[None, :]
        live = (outputs < num_out) & (rows < T)
        targets = out + rows * out_stride + outputs
        if ADD:
            carried = tl.load(targets, mask=live, other=0.0)
        acc = tl.zeros((SPLIT, BLOCK_N, COLUMNS), tl.float32)
        up_acc = tl.zeros((SPLIT, BLOCK_N, COLUMNS), tl.float32)
        for c in tl.static_range(NUM_TILES):
            next_row, next_input = start, (c + 1) * BLOCK_K
            if c == NUM_TILES - 1:
                next_row, next_input = start + stride, 0
            next_tile = _load_tile(weight, next_row, num_out, next_input, SIZE, BLOCK_N, SPLIT, WIDTH)
            if GATED:
                next_up_tile = _load_tile(up_weight, next_row, num_out, next_input, SIZE, BLOCK_N, SPLIT, WIDTH)
            if NORM:
                right = normed[c]
            else:
                right = tl.trans(_load_rows(x, x_stride, c * BLOCK_K, SIZE, T, SPLIT, WIDTH), 0, 2, 1)
            acc = tl.dot(tile, right, acc, input_precision="ieee")
            tile = next_tile
            if GATED:
                up_acc = tl.dot(up_tile, right, up_acc, input_precision="ieee")
                up_tile = next_up_tile
        result = _finish(acc, bias, outputs, num_out, HAS_BIAS).to(out.dtype.element_ty)
        if GATED:
            up = _finish(up_acc, bias + num_out if HAS_BIAS else bias, outputs, num_out, HAS_BIAS)
            result = swiglu(result, up.to(result.dtype))
        if ADD:
            result = (carried.to(tl.float32) + result.to(tl.float32)).to(result.dtype)
        tl.store(targets, result, mask=live)
