"""Torch implementations of the fused projections: the separate ops, one after the other. Shapes: see `ops`.

They are the spec of the fused kernels' rounding, and what a CPU runs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ostinato.kernels.reference import rms_norm, silu_mul

__all__ = ["few_gate_up_silu", "few_linear_residual", "few_norm_linear"]


def few_norm_linear(
    residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
) -> None:
    """See `ops.few_norm_linear`."""
    out.copy_(F.linear(rms_norm(residual, norm_weight, eps), weight, bias))


def few_gate_up_silu(
    residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
) -> None:
    """See `ops.few_gate_up_silu`."""
    out.copy_(silu_mul(F.linear(rms_norm(residual, norm_weight, eps), weight, bias)))


def few_linear_residual(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """See `ops.few_linear_residual`."""
    residual.add_(F.linear(x, weight, bias))
