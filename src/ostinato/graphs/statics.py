"""The registry of everything a graph may read or write besides what it makes itself: weights, buffers, the KV pool.

A graph holds addresses. The registry gives every address a name and asks its owner for the current tensor each time, so
that a tensor that was replaced or moved is noticed, by name, instead of being read where it used to be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ostinato.errors import StaleGraphError

__all__ = ["Statics", "stale"]


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

    def index(self) -> dict[int, str]:
        """The name of every storage, by its address. Of tensors that share a storage, the first registered."""
        names: dict[int, str] = {}
        for name, getter in self._getters.items():
            names.setdefault(getter().untyped_storage().data_ptr(), name)
        names.pop(0, None)  # empty tensors have no address
        return names

    def find(self, tensor: torch.Tensor) -> str | None:
        """The name under which the storage of `tensor` is registered, if it is."""
        return self.index().get(tensor.untyped_storage().data_ptr())

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
