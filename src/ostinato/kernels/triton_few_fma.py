"""The fused projections for one to four rows, by multiply-adds. See `triton_few`.

A thread holds some columns of each row in registers and multiplies every weight with all of them; sums go across the
threads once per block of outputs. At one row nothing is faster; from two rows on the arithmetic begins to show.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# A tuple that grows in an unrolled loop changes its type.
# mypy: disable-error-code="assignment,var-annotated"
# ruff: noqa: RUF005 (inside a kernel Triton knows `a + (b,)` but not `(*a, b)`)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.kernels.triton_few_tile import load_weights, prefetch_weights, swiglu

__all__ = ["linear_residual_kernel", "norm_linear_kernel"]


@triton.jit
def _normalise(value, scale, eps, SIZE: tl.constexpr):
    """RMSNorm of one row, with its two roundings (see `ops.rms_norm`)."""
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    return (scale * normed.to(value.dtype)).to(value.dtype)


@triton.jit
def _multiply(tile, rows, T: tl.constexpr):
    """Products of a tile [BLOCK_N, K] and each of T rows [K], float32."""
    products = ()
    for t in tl.static_range(T):
        products = products + (tile.to(tl.float32) * rows[t].to(tl.float32)[None, :],)
    return products


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_triples(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _add_quadruples(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _sum_inputs(products, T: tl.constexpr):
    """Sums of T tiles [BLOCK_N, K] over K: T vectors [BLOCK_N]. One reduction, because each crosses warps, and so
    waits at two barriers."""
    if T == 1:
        return (tl.sum(products[0], 1),)
    elif T == 2:
        return tl.reduce(products, 1, _add_pairs)
    elif T == 3:
        return tl.reduce(products, 1, _add_triples)
    else:
        tl.static_assert(T == 4)
        return tl.reduce(products, 1, _add_quadruples)


@triton.jit(do_not_specialize=["prefetch"])
def norm_linear_kernel(
    residual,
    norm_weight,
    weight,
    bias,
    out,
    eps,
    num_out,
    residual_stride,
    out_stride,
    prefetch,
    SIZE: tl.constexpr,
    T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (programs,). RMSNorm of `residual [T, SIZE]`, then a linear to `out [T, num_out]`; a tile is BLOCK_N whole
    rows of the weight. GATED: the weight has 2 num_out rows, the gate's first, and the output is silu(gate) * up.
    """
    first = tl.program_id(0) * BLOCK_N
    stride = tl.num_programs(0) * BLOCK_N
    columns = tl.arange(0, BLOCK_K)
    inside = columns < SIZE
    MASKED: tl.constexpr = BLOCK_K != SIZE
    up_weight = weight + tl.cast(num_out, tl.int64) * SIZE
    if PDL:
        gdc_launch_dependents()
    tile = load_weights(weight, first, num_out, columns, SIZE, BLOCK_N, MASKED)
    if GATED:
        up_tile = load_weights(up_weight, first, num_out, columns, SIZE, BLOCK_N, MASKED)
    scale = tl.load(norm_weight + columns, mask=inside, other=0.0)
    if PDL:
        for block in tl.range(1, 1 + prefetch):
            prefetch_weights(weight, first + block * stride, num_out, SIZE, BLOCK_N, LANES)
            if GATED:
                prefetch_weights(up_weight, first + block * stride, num_out, SIZE, BLOCK_N, LANES)
        gdc_wait()

    loaded = ()
    for t in tl.static_range(T):
        loaded = loaded + (tl.load(residual + t * residual_stride + columns, mask=inside, other=0.0),)
    rows = ()
    for t in tl.static_range(T):
        rows = rows + (_normalise(loaded[t], scale, eps, SIZE),)

    for start in tl.range(first, num_out, stride):
        next_tile = load_weights(weight, start + stride, num_out, columns, SIZE, BLOCK_N, MASKED)
        if GATED:
            next_up_tile = load_weights(up_weight, start + stride, num_out, columns, SIZE, BLOCK_N, MASKED)
        outputs = start + tl.arange(0, BLOCK_N)
        live = outputs < num_out
        sums = _sum_inputs(_multiply(tile, rows, T), T)
        if GATED:
            up_sums = _sum_inputs(_multiply(up_tile, rows, T), T)
        for t in tl.static_range(T):
            result = sums[t]
            if HAS_BIAS:
                result += tl.load(bias + outputs, mask=live, other=0.0).to(tl.float32)
            value = result.to(out.dtype.element_ty)
            if GATED:
                up_result = up_sums[t]
                if HAS_BIAS:
                    up_result += tl.load(bias + num_out + outputs, mask=live, other=0.0).to(tl.float32)
                value = swiglu(value, up_result.to(value.dtype))
            tl.store(out + t * out_stride + outputs, value, mask=live)
        tile = next_tile
        if GATED:
            up_tile = next_up_tile


@triton.jit(do_not_specialize=["prefetch"])
def linear_residual_kernel(
    x,
    weight,
    bias,
    residual,
    num_out,
    x_stride,
    residual_stride,
    prefetch,
    SIZE: tl.constexpr,
    T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (programs,). Adds a linear of `x [T, SIZE]` to `residual [T, num_out]`; a tile is BLOCK_N rows by BLOCK_K
    columns of the weight, and the sum over the tiles of a row stays in registers.
    """
    first = tl.program_id(0) * BLOCK_N
    stride = tl.num_programs(0) * BLOCK_N
    columns = tl.arange(0, BLOCK_K)
    MASKED: tl.constexpr = SIZE % BLOCK_K != 0
    if PDL:
        gdc_launch_dependents()
    tile = load_weights(weight, first, num_out, columns, SIZE, BLOCK_N, MASKED)
    if PDL:
        # Of the first block, what lies behind the first tile has to be asked for too.
        SKIP: tl.constexpr = 1 if SIZE <= BLOCK_K else 0
        for block in tl.range(SKIP, SKIP + prefetch):
            prefetch_weights(weight, first + block * stride, num_out, SIZE, BLOCK_N, LANES)
        gdc_wait()

    for start in tl.range(first, num_out, stride):
        outputs = start + tl.arange(0, BLOCK_N)
        live = outputs < num_out
        carried = ()
        sums = ()
        for t in tl.static_range(T):
            carried = carried + (tl.load(residual + t * residual_stride + outputs, mask=live, other=0.0),)
            sums = sums + (tl.zeros((BLOCK_N, BLOCK_K), tl.float32),)
        for k in tl.static_range(0, SIZE, BLOCK_K):
            if k + BLOCK_K < SIZE:
                next_tile = load_weights(weight, start, num_out, k + BLOCK_K + columns, SIZE, BLOCK_N, MASKED)
            else:
                next_tile = load_weights(weight, start + stride, num_out, columns, SIZE, BLOCK_N, MASKED)
            new_sums = ()
            for t in tl.static_range(T):
                row = tl.load(x + t * x_stride + k + columns, mask=k + columns < SIZE, other=0.0)
                new_sums = new_sums + (sums[t] + tile.to(tl.float32) * row.to(tl.float32)[None, :],)
            sums = new_sums
            tile = next_tile
        totals = _sum_inputs(sums, T)
        for t in tl.static_range(T):
            result = totals[t]
            if HAS_BIAS:
                result += tl.load(bias + outputs, mask=live, other=0.0).to(tl.float32)
            delta = result.to(carried[t].dtype).to(tl.float32)
            value = (carried[t].to(tl.float32) + delta).to(carried[t].dtype)
            tl.store(residual + t * residual_stride + outputs, value, mask=live)
