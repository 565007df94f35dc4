"""CUDA implementations of the products of some rows, as the ops take them, and the adding up of parts.

See `triton_small_gemm` for the products.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels.small_configs import Kind, SmallConfig, small_config
from ostinato.kernels.triton_elementwise import norm_num_warps
from ostinato.kernels.triton_launch import early, start
from ostinato.kernels.triton_small_gemm import launch

__all__ = [
    "add_parts",
    "add_parts_kernel",
    "add_parts_rms_norm",
    "small_gate_up_silu",
    "small_linear",
    "small_linear_parts",
]


def small_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """See `ops.small_linear`."""
    launch(_config("plain", x, out), x, weight, bias, out)


def small_gate_up_silu(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """See `ops.small_gate_up_silu`."""
    launch(_config("gated", x, out), x, weight, bias, out, gated=True)


def small_linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None, parts: Tensor) -> None:
    """See `ops.small_linear_parts`. As many parts as `parts` has, whatever the config says."""
    launch(_config("parts", x, parts), x, weight, bias, parts)


def _config(kind: Kind, x: Tensor, out: Tensor) -> SmallConfig:
    (num_rows, size), num_out = x.shape, out.shape[-1]
    config = small_config(kind, num_out, size, num_rows)
    if config is None:
        raise ValueError(
            f"no {kind} kernel for {num_rows} rows of {size} inputs and {num_out} outputs; use the separate ops"
        )
    return config


@triton.jit(do_not_specialize=["part_stride"])
def add_parts_kernel(
    parts,
    residual,
    weight,
    out,
    eps,
    residual_stride,
    part_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T,): one row each. Adds up the parts [P, T, SIZE], adds them to the residual, and norms that."""
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    total = tl.load(parts + row * SIZE + columns, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        at = parts + part * tl.cast(part_stride, tl.int64) + row * SIZE
        total += tl.load(at + columns, mask=inside, other=0.0)
    carried = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
    value = (carried.to(tl.float32) + total.to(carried.dtype).to(tl.float32)).to(carried.dtype)
    tl.store(residual + row * residual_stride + columns, value, mask=inside)
    if NORM:
        scale = tl.load(weight + columns, mask=inside)
        wide = value.to(tl.float32)
        normed = wide * tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
        result = scale * normed.to(value.dtype)
        tl.store(out + row * SIZE + columns, result.to(out.dtype.element_ty), mask=inside)


def add_parts_rms_norm(parts: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """See `ops.add_parts_rms_norm`."""
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    _add(parts, residual, norm_weight, eps, out)
    return out


def add_parts(parts: Tensor, residual: Tensor) -> None:
    """See `ops.add_parts`."""
    _add(parts, residual, None, 0.0, None)


def _add(parts: Tensor, residual: Tensor, norm_weight: Tensor | None, eps: float, out: Tensor | None) -> None:
    num_parts, num_rows, size = parts.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(size)
    add_parts_kernel[(num_rows,)](
        parts, residual, norm_weight, out, eps, residual.stride(0), parts.stride(0), SIZE=size, BLOCK=block,
        PARTS=num_parts, NORM=norm_weight is not None, num_warps=norm_num_warps(block), **early(residual.device),
    )  # fmt: skip
