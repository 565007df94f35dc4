"""CUDA implementations of the products of some rows: more than a stream of weights, fewer than fill a GPU's tensor
cores.

From five rows to a few hundred, a projection still takes about as long as reading its weights, if enough programs read
at a time. A tile of outputs for all rows of a step gives too few programs where a layer is narrow, so

- the inputs are cut into parts as well (split-K). What the parts found is added up by who reads it: the norm behind the
  projection, in the order of the parts, so the sum has the same bits every time. There is no kernel for it, no atomic
  addition, and no program that waits for others.
- a kernel starts while its predecessor runs (programmatic dependent launch) and asks for its first weights in L2. All
  else is read after the wait. See `triton_few` for the order of memory accesses.
- SwiGLU's product is made by the kernel that has gate and up.

`small_configs` says how a product is tiled, and where cuBLAS does better; `triton_small` has the ops.

Legend: T rows, K inputs and N outputs of a projection, P parts, C hidden size.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.kernels.small_configs import SmallConfig
from ostinato.kernels.triton_few_tile import swiglu
from ostinato.kernels.triton_launch import early

__all__ = ["compile_time", "launch", "multiply", "prefetch", "small_gemm_kernel"]


@triton.jit
def prefetch(
    weight, first_row, num_rows, first_input, size,
    BLOCK_N: tl.constexpr, INPUTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Asks for INPUTS inputs of rows [first_row, first_row + BLOCK_N) of a weight [num_rows, size] in L2. Bulk
    prefetches want 16-byte boundaries, which the caller sees to."""
    ELEMENT: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    ROW: tl.constexpr = INPUTS * ELEMENT
    CHUNK: tl.constexpr = ROW if ROW < 1024 else 1024
    PER_ROW: tl.constexpr = ROW // CHUNK
    base = (weight + first_row.to(tl.int64) * size + first_input).to(tl.int64)
    for chunk in tl.static_range(0, BLOCK_N * PER_ROW, LANES):
        index = chunk + tl.arange(0, LANES)
        row = index // PER_ROW
        offset = row.to(tl.int64) * (size * ELEMENT) + (index % PER_ROW) * CHUNK
        asked = ((row < BLOCK_N) & (first_row + row < num_rows)).to(tl.int32)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; } // $0",
            "=r,l,r,r", [base + offset, asked, CHUNK], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def multiply(
    x, weight, up_weight, rows, outputs, first_input, num_rows, num_out, size, part_size, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
    TURNED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """The sums of `x[rows] @ weight[outputs].T` over the part of the inputs that begins at `first_input`, and of
    `up_weight` if GATED (else zeros): two times [BLOCK_M, BLOCK_N] float32."""
    inputs = tl.arange(0, BLOCK_K)
    x_at = x + rows[:, None].to(tl.int64) * x_stride + (first_input + inputs)[None, :]
    weight_at = outputs[:, None].to(tl.int64) * size + (first_input + inputs)[None, :]
    live_rows = rows[:, None] < num_rows
    live_outputs = outputs[:, None] < num_out
    count = tl.minimum(size - first_input, part_size)
    if TURNED:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, count, BLOCK_K, num_stages=STAGES):
        x_inside, w_inside = live_rows, live_outputs
        if not EVEN_K:
            x_inside = x_inside & (k + inputs < count)[None, :]
            w_inside = w_inside & (k + inputs < count)[None, :]
        left = tl.load(x_at + k, mask=x_inside, other=0.0)
        if EVEN_N and EVEN_K:
            right = tl.load(weight + weight_at + k)
        else:
            right = tl.load(weight + weight_at + k, mask=w_inside, other=0.0)
        if TURNED:
            acc = tl.dot(right, tl.trans(left), acc, input_precision="ieee")
        else:
            acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
        if GATED:
            if EVEN_N and EVEN_K:
                up_right = tl.load(up_weight + weight_at + k)
            else:
                up_right = tl.load(up_weight + weight_at + k, mask=w_inside, other=0.0)
            if TURNED:
                up_acc = tl.dot(up_right, tl.trans(left), up_acc, input_precision="ieee")
            else:
                up_acc = tl.dot(left, tl.trans(up_right), up_acc, input_precision="ieee")

    if TURNED:
        acc = tl.trans(acc)
        up_acc = tl.trans(up_acc)
    return acc, up_acc


@triton.jit(do_not_specialize=["num_rows", "part_stride"])
def small_gemm_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_out,
    size,
    part_size,
    x_stride,
    out_stride,
    part_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    TURNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T / BLOCK_M * N / BLOCK_N, P). A linear of `x [T, size]`: each part of `part_size` inputs to its own
    `out[p] [T, num_out]`. GATED: the weight has 2 num_out rows, the gate's first, and the output is silu(gate) * up
    (one part). TURNED: weights are the left operand. EVEN_N, EVEN_K: no tile hangs over. PREFETCH: inputs asked for
    early.
    """
    num_blocks_m = tl.cdiv(num_rows, BLOCK_M)
    tile = tl.program_id(0)
    first_out = (tile // num_blocks_m) * BLOCK_N
    part = tl.program_id(1)
    first_input = part * part_size
    up_weight = weight + tl.cast(num_out, tl.int64) * size
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            prefetch(weight, first_out, num_out, first_input, size, BLOCK_N, PREFETCH, LANES)
            if GATED:
                prefetch(up_weight, first_out, num_out, first_input, size, BLOCK_N, PREFETCH, LANES)
        gdc_wait()

    rows = (tile % num_blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = first_out + tl.arange(0, BLOCK_N)
    acc, up_acc = multiply(
        x, weight, up_weight, rows, outputs, first_input, num_rows, num_out, size, part_size, x_stride,
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GATED, TURNED, EVEN_N, EVEN_K,
    )  # fmt: skip
    live_rows = rows[:, None] < num_rows
    inside = outputs < num_out
    if HAS_BIAS:
        biased = inside & (part == 0)
        acc += tl.load(bias + outputs, mask=biased, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_acc += tl.load(bias + num_out + outputs, mask=biased, other=0.0).to(tl.float32)[None, :]
    result = acc.to(out.dtype.element_ty)
    if GATED:
        result = swiglu(result, up_acc.to(out.dtype.element_ty))
    target = out + part * tl.cast(part_stride, tl.int64) + rows[:, None].to(tl.int64) * out_stride + outputs[None, :]
    tl.store(target, result, mask=live_rows & inside[None, :])


def launch(
    config: SmallConfig, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, gated: bool = False
) -> None:
    """A product with a given config. `x [T, K]`, `weight [N, K]` (gated: [2 N, K], the gate's rows first); `out!` is
    `[T, N]`, or `[P, T, N]` for each part's own share, which are to be added up."""
    (num_rows, size), num_out = x.shape, out.shape[-1]
    parts = out if out.dim() == 3 else out[None]
    num_parts = parts.shape[0]
    aligned = weight.data_ptr() % 16 == 0 and size * weight.element_size() % 16 == 0
    grid = (triton.cdiv(num_rows, config.block_m) * triton.cdiv(num_out, config.block_n), num_parts)
    small_gemm_kernel[grid](
        x, weight, bias, parts, num_rows, num_out, size, config.part_size(size, num_parts), x.stride(0),
        parts.stride(1), parts.stride(0), GATED=gated, HAS_BIAS=bias is not None, num_warps=config.num_warps,
        **compile_time(config, num_out, size, num_parts, aligned=aligned), **early(weight.device),
    )  # fmt: skip


def compile_time(config: SmallConfig, num_out: int, size: int, num_parts: int, *, aligned: bool) -> dict[str, Any]:
    """The compile-time arguments that follow from a config and the shape. `aligned`: rows of the weight begin at
    multiples of 16 bytes, without which nothing is asked for early."""
    part_size = config.part_size(size, num_parts)
    divides = size % part_size == 0 and part_size % config.block_k == 0
    none_empty = part_size * num_parts == size  # an empty part would ask for what is not there
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.num_stages,
        "TURNED": config.turned,
        "EVEN_N": num_out % config.block_n == 0,
        "EVEN_K": divides,
        "PREFETCH": min(config.prefetch, part_size) if divides and none_empty and aligned else 0,
        "LANES": 32 * config.num_warps,
    }
