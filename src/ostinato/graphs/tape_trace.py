"""The trace of one recording on the CPU: which operators ran on which registers. Nothing is computed to make it.

Every operator is one of four kinds:
- a *view* is taken for real: it computes nothing, and later views need its geometry;
- an *allocation* (`torch.empty` and its like) makes memory of undefined content;
- a *functional* operator makes new tensors: their shapes come from running it on meta tensors, and the caller gets
  uninitialised memory;
- an operator that *mutates* hands back the argument that it would have written.

A register is a tensor's place in the trace. Registers are found by geometry (storage, dtype, offset, sizes, strides):
any two tensors that are the same view of the same memory are the same register.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from ostinato.errors import CaptureError
from ostinato.graphs.nest import leaves, map_leaves
from ostinato.graphs.tape_rules import refused
from ostinato.graphs.tape_shapes import Shapes

__all__ = ["Geometry", "Kind", "Memory", "Node", "Register", "Trace", "typed"]

_ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)
# Declared as new memory for the sake of autograd, but their result aliases the argument.
_UNDECLARED_VIEWS = frozenset({torch.ops.aten._unsafe_view.default})


class Kind(enum.Enum):
    VIEW = enum.auto()
    ALLOCATION = enum.auto()
    FUNCTIONAL = enum.auto()
    MUTATION = enum.auto()


class Geometry(NamedTuple):
    """Which part of which storage a tensor is; offset and strides in elements."""

    storage: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Register:
    """Stands for a tensor in the arguments of a node."""

    index: int


@dataclass(frozen=True, slots=True)
class Node:
    """One operator. `outputs` are the registers of its results in order, -1 where a result is one of the arguments."""

    kind: Kind
    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """A storage made during the recording, and the tensor that covers it."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def is_held_elsewhere(self) -> bool:
        """Whether any tensor besides this record keeps the storage alive."""
        return int(torch._C._storage_Use_Count(self.storage._cdata)) > 1


def typed(memory: Memory) -> torch.Tensor:
    """The tensor over all of `memory`."""
    return torch.empty(0, dtype=memory.dtype).set_(memory.storage, 0, memory.size, memory.stride)


class Trace:
    """Grows by `record` while a tape is recording.

    `admit(tensor)` is asked once for each tensor from before the recording, and raises CaptureError for memory that a
    graph must not refer to.
    """

    def __init__(self, device: torch.device, shapes: Shapes, admit: Callable[[torch.Tensor], None]) -> None:
        self.nodes: list[Node] = []
        self.memories: dict[int, Memory] = {}
        self.constants: list[torch.Tensor | None] = []  # by register: the tensor, if it is from before the recording
        self.homes: list[int] = []  # by register: the memory that it is in, or -1
        self.geometries: list[Geometry] = []  # by register
        self._bases: list[int] = []  # by memory: the register that covers it
        self._device = device
        self._shapes = shapes
        self._admit = admit
        self._registers: dict[Geometry, int] = {}
        self._memory_of: dict[int, int] = {}

    def record(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Notes the call and returns what stands for its result."""
        if func is torch.ops.aten.lift_fresh.default:
            # A Python number on its way into an operator, as in x[0] = 5: a kernel argument, fixed like any other.
            self._new_register(args[0], constant=args[0], home=-1)
            return args[0]
        if func is torch.ops.aten.detach_.default:
            return args[0]  # nothing is differentiated here
        if func._schema.is_mutable:
            return self._mutation(func, args, kwargs)
        if func.is_view or func in _UNDECLARED_VIEWS:
            return self._view(func, args, kwargs)
        return self._functional(func, args, kwargs)

    def close(self) -> None:
        """Ends the trace: `memories` keeps those that a tensor outside still uses, which are its outputs."""
        self._registers.clear()
        self._memory_of.clear()
        self.drop_unused()

    def drop_unused(self) -> None:
        """Lets go of memories that nobody outside uses any more. They become intermediates, made anew at every run."""
        self.memories = {home: memory for home, memory in self.memories.items() if memory.is_held_elsewhere()}

    @property
    def num_launches(self) -> int:
        return sum(node.kind in (Kind.FUNCTIONAL, Kind.MUTATION) for node in self.nodes)

    # -- kinds -------------------------------------------------------------------------------------------------------

    def _view(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        node_args, node_kwargs = self._to_registers(args), self._to_registers(dict(kwargs))
        result = func(*args, **kwargs)
        tensors = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
        sources = [leaf for leaf in leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
        known = {tensor.untyped_storage()._cdata for tensor in sources}
        if any(tensor.untyped_storage()._cdata not in known for tensor in tensors):
            # It copied, as some views may: then it is an ordinary operator.
            return self._functional(func, args, kwargs)
        outputs = []
        for tensor in tensors:
            home = self._memory_of.get(tensor.untyped_storage()._cdata, -1)
            if _geometry(tensor) in self._registers:
                outputs.append(-1)
            else:
                outputs.append(self._new_register(tensor, constant=tensor if home < 0 else None, home=home))
        if any(index >= 0 and self.homes[index] >= 0 for index in outputs):
            self.nodes.append(Node(Kind.VIEW, func, node_args, node_kwargs, tuple(outputs)))
        return result

    def _functional(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        node_args, node_kwargs = self._to_registers(args), self._to_registers(dict(kwargs))
        try:
            shapes = self._shapes.of(func, args, kwargs, {})
        except NotImplementedError as error:
            raise _unknown_shape(func) from error
        result = map_leaves(torch.Tensor, self._empty, shapes)
        outputs = [self._new_memory(leaf) if isinstance(leaf, torch.Tensor) else -1 for leaf in leaves(result)]
        kind = Kind.ALLOCATION if func in _ALLOCATIONS else Kind.FUNCTIONAL
        self.nodes.append(Node(kind, func, node_args, node_kwargs, tuple(outputs)))
        return result

    def _mutation(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        node_args, node_kwargs = self._to_registers(args), self._to_registers(dict(kwargs))
        schema = func._schema
        written: dict[str, Any] = {}  # alias set -> the argument that is written and may be returned
        for position, parameter in enumerate(schema.arguments):
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(parameter.name)
                written.update((name, value) for name in parameter.alias_info.before_set)
        try:
            shapes = self._shapes.of(func, args, kwargs, written)
        except NotImplementedError as error:
            if any(returned.alias_info is None for returned in schema.returns):
                raise _unknown_shape(func) from error
            shapes = (None,) * len(schema.returns)
        results, outputs = [], []
        for returned, shape in zip(schema.returns, shapes if isinstance(shapes, tuple) else (shapes,), strict=False):
            if returned.alias_info is not None:
                results.append(written[next(iter(returned.alias_info.before_set))])
                outputs.append(-1)
            elif isinstance(shape, torch.Tensor):
                results.append(self._empty(shape))
                outputs.append(self._new_memory(results[-1]))
        self.nodes.append(Node(Kind.MUTATION, func, node_args, node_kwargs, tuple(outputs)))
        if not schema.returns:
            return None
        return results[0] if len(schema.returns) == 1 else tuple(results)

    # -- registers ---------------------------------------------------------------------------------------------------

    def _to_registers(self, values: Any) -> Any:
        return map_leaves(torch.Tensor, self._register, values)

    def _register(self, tensor: torch.Tensor) -> Register:
        index = self._registers.get(_geometry(tensor))
        if index is None:
            home = self._memory_of.get(tensor.untyped_storage()._cdata)
            if home is None:
                self._admit(tensor)
                index = self._new_register(tensor, constant=tensor, home=-1)
            else:
                index = self._unseen_view(tensor, home)
        return Register(index)

    def _unseen_view(self, tensor: torch.Tensor, home: int) -> int:
        """A register for a view that was made where the dispatcher does not look (`.data`, for one)."""
        base = self._bases[home]
        if tensor.dtype != self.memories[home].dtype:
            raise refused("a view of another dtype was made out of the tape's sight", "make it with tensor.view(dtype)")
        index = self._new_register(tensor, constant=None, home=home)
        place = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        self.nodes.append(Node(Kind.VIEW, torch.ops.aten.as_strided.default, (Register(base), *place), {}, (index,)))
        return index

    def _empty(self, shape: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=self._device)

    def _new_register(self, tensor: torch.Tensor, *, constant: torch.Tensor | None, home: int) -> int:
        index = len(self.homes)
        self.homes.append(home)
        self.constants.append(constant)
        geometry = _geometry(tensor)
        self.geometries.append(geometry)
        self._registers[geometry] = index
        return index

    def _new_memory(self, tensor: torch.Tensor) -> int:
        # The storage is kept while recording, so that its identity is not given to another one.
        storage = tensor.untyped_storage()
        home = len(self._bases)
        self.memories[home] = Memory(storage, tensor.dtype, tuple(tensor.shape), tensor.stride())
        self._memory_of[storage._cdata] = home
        index = self._new_register(tensor, constant=None, home=home)
        self._bases.append(index)
        return index


def _unknown_shape(func: OpOverload) -> CaptureError:
    return refused(f"{func} has no meta implementation, so the shape of its result is unknown", "register one for it")


def _geometry(tensor: torch.Tensor) -> Geometry:
    return Geometry(
        tensor.untyped_storage()._cdata,
        tensor.dtype,
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tensor.stride(),
    )
