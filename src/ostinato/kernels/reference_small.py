"""Torch implementations of the products of some rows: the separate ops, one after the other. Shapes: see `ops`.

They are the spec of the kernels' rounding, and what a CPU runs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ostinato.kernels.ops_sampling import SamplingState
from ostinato.kernels.reference import rms_norm, silu_mul
from ostinato.kernels.reference_sampling import sample, stores_logits

__all__ = [
    "add_parts",
    "add_parts_rms_norm",
    "small_gate_up_silu",
    "small_linear",
    "small_linear_parts",
    "small_linear_sample",
]


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


def small_linear_sample(x: Tensor, weight: Tensor, row_slot: Tensor, *rest: Tensor) -> None:
    """See `ops.small_linear_sample`; `rest` is the state and what comes behind it there."""
    count = len(SamplingState._fields)
    state = SamplingState(*rest[:count])
    num_logprobs, logits, adjusted, sampled = rest[count:]
    found = F.linear(x, weight)
    sample(found, row_slot, *state, adjusted, sampled)
    asked = (state.temperature, state.top_p, state.min_p, state.top_k, state.flags, num_logprobs)
    stored = stores_logits(weight.shape[0], row_slot[: x.shape[0]], *asked)
    logits[stored] = found[stored]


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
