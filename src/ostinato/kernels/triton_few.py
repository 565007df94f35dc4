"""CUDA implementations of the fused projections for a few rows: a step that reads every weight once, and little else.

At one to four rows a projection is a stream of weights from device memory. Four things keep the stream from pausing:

- Programs are persistent (one wave, a few per multiprocessor). Each walks over blocks of output rows and loads the next
  block's weights before it reduces the present one's.
- A kernel lets its successor start at once, and starts itself while its predecessor still runs (programmatic dependent
  launch). What it does before `gdc_wait` is load its first weights into registers and ask for the next ones in L2.
- The norm in front, and the activation or the residual add behind, are part of the kernel: every program normalises
  the few rows itself, which costs a read of some kilobytes from L2 and saves a kernel.
- Weights pass through the caches as first to evict, so that the rows stay.

Order of memory accesses. Only weights, which no kernel of a step writes, are read before the wait. The wait returns
when all kernels launched before have finished: the predecessor, and, since it waited too, everything before it. So all
that a step's kernels produce is read after the wait, and nothing is overwritten (the residual is, in place) before its
last reader is done. Kernels launched without the attribute wait for everything anyhow.

Rounding is that of the separate ops: the normed row, a linear's output and silu are rounded to the tensors' type, sums
of products are float32.

Legend: T rows, C hidden size, K inputs and N outputs of a projection, I intermediate size.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.kernels.few_configs import MAX_FEW_ROWS, FewConfig, Kind, few_config

__all__ = [
    "few_gate_up_silu",
    "few_linear_residual",
    "few_norm_linear",
    "launch_linear_residual",
    "launch_norm_linear",
    "linear_residual_kernel",
    "norm_linear_kernel",
]

LINE_BYTES = tl.constexpr(128)


@triton.jit
def _load_weights(weight, first_row, num_rows, columns, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    """Rows [first_row, first_row + BLOCK_N) of a weight [num_rows, SIZE], zeros outside: [BLOCK_N, len(columns)]."""
    rows = first_row + tl.arange(0, BLOCK_N)
    inside = (rows < num_rows)[:, None]
    if MASKED:
        inside = inside & (columns < SIZE)[None, :]
    pointers = weight + rows[:, None].to(tl.int64) * SIZE + columns[None, :]
    return tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _prefetch_weights(weight, first_row, num_rows, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, LINES: tl.constexpr):
    """Asks for the same rows in L2. LINES: a power of two not below the number of cache lines."""
    LINE: tl.constexpr = LINE_BYTES // (weight.dtype.element_ty.primitive_bitwidth // 8)
    offsets = first_row.to(tl.int64) * SIZE + tl.minimum(tl.arange(0, LINES) * LINE, BLOCK_N * SIZE - 1)
    last = tl.cast(num_rows, tl.int64) * SIZE - 1
    addresses = (weight + tl.minimum(offsets, last)).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


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
    PREFETCH_LINES: tl.constexpr,
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
    tile = _load_weights(weight, first, num_out, columns, SIZE, BLOCK_N, MASKED)
    if GATED:
        up_tile = _load_weights(up_weight, first, num_out, columns, SIZE, BLOCK_N, MASKED)
    scale = tl.load(norm_weight + columns, mask=inside, other=0.0)
    if PDL:
        for ahead in tl.range(1, 1 + prefetch):
            _prefetch_weights(weight, first + ahead * stride, num_out, SIZE, BLOCK_N, PREFETCH_LINES)
            if GATED:
                _prefetch_weights(up_weight, first + ahead * stride, num_out, SIZE, BLOCK_N, PREFETCH_LINES)
        gdc_wait()

    loaded = ()
    for t in tl.static_range(T):
        loaded = loaded + (tl.load(residual + t * residual_stride + columns, mask=inside, other=0.0),)
    rows = ()
    for t in tl.static_range(T):
        rows = rows + (_normalise(loaded[t], scale, eps, SIZE),)

    for start in tl.range(first, num_out, stride):
        next_tile = _load_weights(weight, start + stride, num_out, columns, SIZE, BLOCK_N, MASKED)
        if GATED:
            next_up_tile = _load_weights(up_weight, start + stride, num_out, columns, SIZE, BLOCK_N, MASKED)
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
                gate = value.to(tl.float32)
                value = (gate / (1.0 + tl.exp(-gate))).to(value.dtype) * up_result.to(value.dtype)
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
    PREFETCH_LINES: tl.constexpr,
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
    tile = _load_weights(weight, first, num_out, columns, SIZE, BLOCK_N, MASKED)
    if PDL:
        # Of the first block, what lies behind the first tile has to be asked for too.
        SKIP: tl.constexpr = 1 if SIZE <= BLOCK_K else 0
        for ahead in tl.range(SKIP, SKIP + prefetch):
            _prefetch_weights(weight, first + ahead * stride, num_out, SIZE, BLOCK_N, PREFETCH_LINES)
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
                next_tile = _load_weights(weight, start, num_out, k + BLOCK_K + columns, SIZE, BLOCK_N, MASKED)
            else:
                next_tile = _load_weights(weight, start + stride, num_out, columns, SIZE, BLOCK_N, MASKED)
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


def few_norm_linear(
    residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
) -> None:
    """See `ops.few_norm_linear`."""
    _launch_norm_linear("norm", residual, norm_weight, weight, bias, eps, out)


def few_gate_up_silu(
    residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
) -> None:
    """See `ops.few_gate_up_silu`."""
    _launch_norm_linear("gated", residual, norm_weight, weight, bias, eps, out)


def few_linear_residual(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """See `ops.few_linear_residual`."""
    num_out, size = weight.shape
    launch_linear_residual(few_config("residual", num_out, size, _num_rows(x)), x, weight, bias, residual)


def _launch_norm_linear(
    kind: Kind,
    residual: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
) -> None:
    config = few_config(kind, out.shape[1], weight.shape[1], _num_rows(residual))
    launch_norm_linear(config, kind == "gated", residual, norm_weight, weight, bias, eps, out)


def launch_norm_linear(
    config: FewConfig,
    gated: bool,
    residual: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
) -> None:
    """`few_norm_linear` or `few_gate_up_silu` with a given config: what the tuner calls."""
    (num_rows, num_out), size = out.shape, weight.shape[1]
    num_multiprocessors, programmatic = _device(weight.device)
    norm_linear_kernel[(config.num_programs(num_out, num_multiprocessors),)](
        residual, norm_weight, weight, bias, out, eps, num_out, residual.stride(0), out.stride(0),
        config.prefetch, GATED=gated, HAS_BIAS=bias is not None, PDL=programmatic,
        **config.compile_time(size, num_rows, weight.element_size()),
        num_warps=config.num_warps, launch_pdl=programmatic,
    )  # fmt: skip


def launch_linear_residual(
    config: FewConfig, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor
) -> None:
    """`few_linear_residual` with a given config: what the tuner calls."""
    (num_rows, num_out), size = residual.shape, weight.shape[1]
    num_multiprocessors, programmatic = _device(weight.device)
    linear_residual_kernel[(config.num_programs(num_out, num_multiprocessors),)](
        x, weight, bias, residual, num_out, x.stride(0), residual.stride(0),
        config.prefetch, HAS_BIAS=bias is not None, PDL=programmatic,
        **config.compile_time(size, num_rows, weight.element_size()),
        num_warps=config.num_warps, launch_pdl=programmatic,
    )  # fmt: skip


def _num_rows(x: Tensor) -> int:
    num_rows = x.shape[0]
    if not 1 <= num_rows <= MAX_FEW_ROWS:
        raise ValueError(f"the few-row kernels take 1 to {MAX_FEW_ROWS} rows, got {num_rows}; use the separate ops")
    return num_rows


@functools.cache
def _device(device: torch.device) -> tuple[int, bool]:
    """Multiprocessors of a device, and whether it has programmatic dependent launch. In Triton's interpreter tensors
    are on the CPU: two, so that programs walk over several blocks there too."""
    if device.type != "cuda":
        return 2, False
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major >= 9
