"""Tensors as bit patterns: poison to write, patterns to compare."""

from __future__ import annotations

import torch

__all__ = ["as_bits", "poison_"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def poison_(tensor: torch.Tensor, value: int | None = None) -> torch.Tensor:
    """Fills `tensor` in place with what must never be read: NaN in floats, `value` in integers (default: the largest).

    Booleans become true. Returns the tensor.
    """
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.iinfo(tensor.dtype).max if value is None else value)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers of the same width, so that equal means the same bits (NaN included)."""
    if not tensor.dtype.is_floating_point:
        return tensor
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])
