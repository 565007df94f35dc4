"""The fused projections for one to four rows, by multiply-adds, with the weights on their way through shared memory.

As `triton_few_fma`, but the compiler turns the loop's loads of weights into copies to shared memory, several tiles
ahead, and puts the first of them in front of the loop: before the wait, which stands in the loop's first turn. So a
program has much in flight and few registers, and a multiprocessor has room for the programs of the kernels around it.
The order is not to be left to the compiler elsewhere: what is read in the loop beside the weights would be copied ahead
too, hence before the wait. The rows are therefore loaded inside a branch, and the residual by a volatile load.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# A tuple that grows in an unrolled loop changes its type.
# mypy: disable-error-code="assignment,var-annotated"
# ruff: noqa: RUF005 (inside a kernel Triton knows `a + (b,)` but not `(*a, b)`)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.kernels.triton_few_fma import multiply, normalise, sum_inputs
from ostinato.kernels.triton_few_tile import load_weights, swiglu

__all__ = ["stream_kernel"]


@triton.jit
def stream_kernel(
    x,
    norm_weight,
    weight,
    bias,
    out,
    eps,
    num_out,
    x_stride,
    out_stride,
    SIZE: tl.constexpr,
    T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (programs,). A linear of `x [T, SIZE]` to `out [T, num_out]`; a tile is BLOCK_N whole rows of the weight.
    NORM: of the RMSNorm of x; GATED: the weight has 2 num_out rows, the gate's first, and the output is
    silu(gate) * up; ADD: it is added to what `out` holds.
    """
    first = tl.program_id(0) * BLOCK_N
    stride = tl.num_programs(0) * BLOCK_N
    columns = tl.arange(0, BLOCK_K)
    inside = columns < SIZE
    MASKED: tl.constexpr = BLOCK_K != SIZE
    up_weight = weight + tl.cast(num_out, tl.int64) * SIZE
    if PDL:
        gdc_launch_dependents()
    if NORM:
        scale = tl.load(norm_weight + columns, mask=inside, other=0.0)
    rows = ()
    for _ in tl.static_range(T):
        rows = rows + (tl.zeros((BLOCK_K,), x.dtype.element_ty),)

    for start in tl.range(first, num_out, stride, num_stages=STAGES):
        tile = load_weights(weight, start, num_out, columns, SIZE, BLOCK_N, MASKED)
        if GATED:
            up_tile = load_weights(up_weight, start, num_out, columns, SIZE, BLOCK_N, MASKED)
        if start == first:
            if PDL:
                gdc_wait()
            loaded = ()
            for t in tl.static_range(T):
                value = tl.load(x + t * x_stride + columns, mask=inside, other=0.0)
                if NORM:
                    value = normalise(value, scale, eps, SIZE)
                loaded = loaded + (value,)
            rows = loaded
        outputs = start + tl.arange(0, BLOCK_N)
        live = outputs < num_out
        if GATED and T <= 2:
            both = sum_inputs(multiply(tile, rows, T) + multiply(up_tile, rows, T), 2 * T)
            sums = both[:T]
            up_sums = both[T:]
        else:
            sums = sum_inputs(multiply(tile, rows, T), T)
            if GATED:
                up_sums = sum_inputs(multiply(up_tile, rows, T), T)
        for t in tl.static_range(T):
            result = sums[t]
            if HAS_BIAS:
                result += tl.load(bias + outputs, mask=live, other=0.0, volatile=True).to(tl.float32)
            value = result.to(out.dtype.element_ty)
            if GATED:
                up_result = up_sums[t]
                if HAS_BIAS:
                    up_bias = tl.load(bias + num_out + outputs, mask=live, other=0.0, volatile=True)
                    up_result += up_bias.to(tl.float32)
                value = swiglu(value, up_result.to(value.dtype))
            target = out + t * out_stride + outputs
            if ADD:
                carried = tl.load(target, mask=live, other=0.0, volatile=True)
                value = (carried.to(tl.float32) + value.to(tl.float32)).to(carried.dtype)
            tl.store(target, value, mask=live)
