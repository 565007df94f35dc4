"""The shapes of results without the results: operators are run on meta tensors, which have geometry and no memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from ostinato.graphs.nest import map_leaves
from ostinato.graphs.tape_rules import refused

__all__ = ["Shapes"]

aten = torch.ops.aten

# torch's meta kernels of matrix products are Python and import its compiler at their first use (some 2 s). The rule
# below says the same for products of plain matrices; anything else goes to torch, which also words the errors.
_PRODUCTS = {aten.mm.default: 0, aten.mm.out: 0, aten.addmm.default: 1, aten.addmm.out: 1}
"""Operator -> where its two matrices begin among the arguments."""


class Shapes:
    """Runs operators on meta tensors, and remembers: the layers of a model all ask the same questions."""

    def __init__(self) -> None:
        self._known: dict[object, Any] = {}

    def of(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], written: Mapping[str, Any]) -> Any:
        """What the operator returns, as meta tensors. `written` are the arguments that it writes.

        Raises what the operator raises for wrong shapes, NotImplementedError where it has no meta implementation, and
        CaptureError where it would resize what it writes.
        """
        question = (func, _signature(args), _signature(tuple(kwargs.items())))
        try:
            if question in self._known:
                return self._known[question]
        except TypeError:  # an argument without a hash
            return _run_on_meta(func, args, kwargs, written)
        answer = self._known[question] = _run_on_meta(func, args, kwargs, written)
        return answer


def _signature(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.stride())
    if isinstance(value, (tuple, list)):
        return tuple([_signature(item) for item in value])
    return (type(value), value)  # 1, 1.0 and True are equal, but do not promote alike


def _run_on_meta(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], written: Mapping[str, Any]) -> Any:
    twins: dict[int, torch.Tensor] = {}

    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in twins:
            twins[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return twins[id(tensor)]

    meta_args, meta_kwargs = map_leaves(torch.Tensor, to_meta, (args, dict(kwargs)))
    parameters = {parameter.name for parameter in func._schema.arguments}
    if "device" in parameters:
        meta_kwargs["device"] = torch.device("meta")
    if "pin_memory" in parameters:
        meta_kwargs["pin_memory"] = False
    shapes = _product(func, meta_args, meta_kwargs)
    if shapes is None:
        shapes = func(*meta_args, **meta_kwargs)
    for target in written.values():
        if isinstance(target, torch.Tensor) and to_meta(target).shape != target.shape:
            raise refused(
                f"{func} resizes its output from {tuple(target.shape)} to {tuple(to_meta(target).shape)}",
                "give it an output of the right shape",
            )
    return shapes


def _product(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    first = _PRODUCTS.get(func)
    if first is None or set(kwargs) - {"out"}:
        return None
    left, right = args[first : first + 2]
    fits = left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0] and left.dtype == right.dtype
    shape = (left.shape[0], right.shape[1]) if fits else None
    out = kwargs.get("out")
    if shape is None or (first and args[0].shape not in (shape, shape[1:])) or (out is not None and out.shape != shape):
        return None
    return out if out is not None else torch.empty(shape, dtype=left.dtype, device="meta")
