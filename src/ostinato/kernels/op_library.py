"""How ops are registered: their schemas, and where each is implemented."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

__all__ = ["Op", "no_output", "register"]


class Op(NamedTuple):
    """An op of `torch.ops.ostinato`. Implementations are functions of its name in modules of `ostinato.kernels`."""

    name: str
    cpu: str
    cuda: str | None  # None: nobody needs it there
    schema: str
    meta: Callable[..., Tensor | None]


def no_output(*_: Any) -> None:
    """The shape function of an op that only writes to its arguments."""
    return None


def register(ops: Iterable[Op]) -> None:
    """Defines the ops; their implementations are imported at the first call, so that a CPU process never needs
    Triton."""
    # `Library.impl` and not `torch.library.custom_op`: the latter wraps every call in several Python layers.
    for op in ops:
        _LIBRARY.define(op.name + op.schema)
        _LIBRARY.impl(op.name, _imported_at_first_call(op.cpu, op.name), "CPU")
        _LIBRARY.impl(op.name, op.meta, "Meta")
        if op.cuda is not None:
            _LIBRARY.impl(op.name, _imported_at_first_call(op.cuda, op.name), "CUDA")


_LIBRARY: Final = torch.library.Library("ostinato", "DEF")  # registrations live as long as this


def _imported_at_first_call(module: str, name: str) -> Callable[..., Any]:
    """A function that calls `ostinato.kernels.<module>.<name>`."""

    @functools.cache
    def load() -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(importlib.import_module(f"ostinato.kernels.{module}"), name)
        return function

    def call(*args: Any) -> Any:
        return load()(*args)

    return call
