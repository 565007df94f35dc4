"""What a tape refuses to record, as CUDA would: host reads, shapes that depend on data, memory from the host.

The checks are on the operator's schema and tags. `.tolist()`, `.numpy()` and tensors built from host values never reach
the dispatcher with their meaning intact, so a function mode watches for them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from ostinato.errors import CaptureError
from ostinato.graphs.source import calling_line

__all__ = ["HostReads", "refuse_unrepeatable", "refused"]

_HOST_READS = {
    torch.Tensor.tolist: ".tolist() reads a tensor on the host",
    torch.Tensor.numpy: ".numpy() reads a tensor on the host",
    torch.Tensor.__array__: "numpy reads a tensor on the host",
    torch.Tensor.cpu: ".cpu() copies a tensor to the host and waits for it",
}
_HOST_BUILT = {
    torch.tensor: "torch.tensor(...)",
    torch.as_tensor: "torch.as_tensor(...)",
    torch.asarray: "torch.asarray(...)",
    torch.from_numpy: "torch.from_numpy(...)",
    torch.frombuffer: "torch.frombuffer(...)",
}
_READ_REMEDY = "the value would be frozen into the graph. Keep it on the device, or do this behind a cut"
_BUILT_REMEDY = (
    "the graph would repeat today's values. Make it before recording and register it, or fill it on the device"
)
_SHAPE_REMEDY = "a graph has fixed shapes. Use a mask (torch.where, masked_fill) over the padded size"
_RNG_REMEDY = "a graph cannot advance the generator's state. Use a counter-based generator keyed by tensors"
_MOVE_REMEDY = "a graph holds addresses. Size the tensor for the maximum and take views"


def refused(what: str, remedy: str) -> CaptureError:
    """The error for `what`, at the line of the caller's code that asked for it."""
    return CaptureError(f"{calling_line()}: {what} inside a recording: {remedy}")


class HostReads(TorchFunctionMode):
    """While active, raises CaptureError for calls that pass tensors to the host, or host values to tensors."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _HOST_READS:
            raise refused(_HOST_READS[func], _READ_REMEDY)
        if func in _HOST_BUILT and not (args and isinstance(args[0], torch.Tensor)):
            raise refused(f"{_HOST_BUILT[func]} builds a tensor from host values", _BUILT_REMEDY)
        return func(*args, **(kwargs or {}))


def refuse_unrepeatable(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises CaptureError if a graph could not repeat this call."""
    tags = func.tags
    if torch.Tag.data_dependent_output in tags:
        raise refused(f"{func} reads a tensor on the host", _READ_REMEDY)
    if torch.Tag.dynamic_output_shape in tags and _has_dynamic_shape(func, args, kwargs):
        raise refused(f"{func} makes a tensor whose shape depends on data", _SHAPE_REMEDY)
    if torch.Tag.nondeterministic_seeded in tags and _argument(func, "dropout_p", args, kwargs, default=1.0) != 0.0:
        raise refused(f"{func} draws random numbers", _RNG_REMEDY)
    if torch.Tag.inplace_view in tags and func is not torch.ops.aten.detach_.default:
        raise refused(f"{func} resizes or moves a tensor", _MOVE_REMEDY)
    if func is torch.ops.aten.lift_fresh.default and args[0].dim() > 0:
        raise refused("a tensor is built from host values", _BUILT_REMEDY)
    if func.overloadpacket in (torch.ops.aten.index_put, torch.ops.aten.index_put_) and _has_mask(args[1]):
        raise refused(f"{func} with a boolean mask has a shape that depends on data", _SHAPE_REMEDY)


def _has_dynamic_shape(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if func is torch.ops.aten.index.Tensor:
        return _has_mask(args[1])
    # repeat_interleave and its like have a fixed shape where the caller states the size.
    return _argument(func, "output_size", args, kwargs, default=None) is None


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _argument(func: OpOverload, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], default: Any) -> Any:
    """The value passed for parameter `name`; its own default if it was left out; `default` if there is no such one."""
    for position, parameter in enumerate(func._schema.arguments):
        if parameter.name == name:
            if position < len(args):
                return args[position]
            return kwargs.get(name, parameter.default_value)
    return default
