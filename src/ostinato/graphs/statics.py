"""The registry of everything a graph may read or write besides what it makes itself: weights, buffers, the KV pool.

A graph holds addresses. The registry gives every address a name and asks its owner for the current tensor each time, so
that a tensor that was replaced or moved is noticed, by name, instead of being read where it used to be.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping

import torch

from ostinato.errors import StaleGraphError

__all__ = ["StaticIndex", "Statics", "stale"]


class StaticIndex:
    """Which tensor an address belongs to. Several may share a storage; of those that overlap, one is named."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        spans = sorted((t.data_ptr(), t.data_ptr() + _extent(t), name) for name, t in tensors if t.numel())
        self._begins = [begin for begin, _, _ in spans]
        self._spans = spans

    def find(self, tensor: torch.Tensor) -> str | None:
        """The name of the tensor in whose memory this one begins."""
        address = tensor.data_ptr()
        place = bisect_right(self._begins, address) - 1
        if place < 0:
            return None
        _, end, name = self._spans[place]
        return name if address < end else None


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class Statics:
    """Names for tensors at fixed addresses."""

    def __init__(self) -> None:
        self._getters: dict[str, Callable[[], torch.Tensor]] = {}

    def add(self, name: str, getter: Callable[[], torch.Tensor]) -> None:
        """Registers the tensor that `getter` returns whenever it is asked. Raises ValueError for a taken name."""
        if name in self._getters:
            raise ValueError(f"a static tensor called {name!r} is registered already")
        self._getters[name] = getter

    def __contains__(self, name: str) -> bool:
        return name in self._getters

    def __len__(self) -> int:
        return len(self._getters)

    def current(self, name: str) -> torch.Tensor:
        return self._getters[name]()

    def index(self) -> StaticIndex:
        """Of the memory that all of them take now."""
        return StaticIndex((name, getter()) for name, getter in self._getters.items())

    def find(self, tensor: torch.Tensor) -> str | None:
        """The name of the registered tensor in whose memory `tensor` begins, if it does in one."""
        return self.index().find(tensor)

    def addresses(self) -> dict[str, int]:
        """Where every tensor is now."""
        return {name: getter().data_ptr() for name, getter in self._getters.items()}

    def verify(self, recorded: Mapping[str, int]) -> None:
        """Raises StaleGraphError, naming the first tensor that is not where it was `recorded`."""
        for name, address in recorded.items():
            getter = self._getters.get(name)
            if getter is None:
                raise StaleGraphError(f"static tensor {name!r} was recorded by a graph but is not registered any more")
            now = getter().data_ptr()
            if now != address:
                raise stale(name, address, now)


def stale(name: str, recorded: int, now: int) -> StaleGraphError:
    """The error for static tensor `name`, recorded at one address and found at another."""
    return StaleGraphError(
        f"static tensor {name!r} is at {now:#x}, but the graph was recorded with it at {recorded:#x}: it was replaced "
        "or resized after recording. Update it in place (tensor.copy_(new)), or record again"
    )
