"""Torch implementations of the products of some rows: the separate ops, one after the other. Shapes: see `ops`.

They are the spec of the kernels' rounding, and what a CPU runs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ostinato.kernels.reference import rms_norm, silu_mul

__all__ = ["add_parts", "add_parts_rms_norm", "small_gate_up_silu", "small_linear", "small_linear_parts"]


def small_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """See `ops.small_linear`."""
    out.copy_(F.linear(x, weight, bias))


def small_gate_up_silu(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """See `ops.small_gate_up_silu`."""
    out.copy_(silu_mul(F.linear(x, weight, bias)))


def small_linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None, parts: Tensor) -> None:
    """See `ops.small_linear_parts`. All of it is in the first part."""
    parts[0].copy_(F.linear(x.float(), weight.float(), None if bias is None else bias.float()))
    parts[1:].zero_()


def add_parts_rms_norm(parts: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """See `ops.add_parts_rms_norm`."""
    add_parts(parts, residual)
    return rms_norm(residual, norm_weight, eps)


def add_parts(parts: Tensor, residual: Tensor) -> None:
    """See `ops.add_parts`."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    residual.add_(total.to(residual.dtype))
