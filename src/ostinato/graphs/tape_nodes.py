"""The operators of a recorded tape, with the shapes of their arguments and what each has to wait for.

An operator depends on an earlier one if both touch the same part of the same storage and one of them writes. A part is
taken to be everything from a tensor's first element to its last, so that views with gaps count as if they had none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ostinato.graphs.nest import leaves
from ostinato.graphs.nodes import GraphNode
from ostinato.graphs.tape_trace import Geometry, Kind, Node, Register

__all__ = ["tape_nodes"]


class _Access(NamedTuple):
    """Bytes [first, end) of a storage."""

    node: int
    first: int
    end: int
    writes: bool

    def conflicts(self, later: _Access) -> bool:
        return (self.writes or later.writes) and self.first < later.end and later.first < self.end

    def is_covered_by(self, later: _Access) -> bool:
        """Whoever conflicts with this one conflicts with the later one too."""
        return later.writes and later.first <= self.first and self.end <= later.end


def tape_nodes(nodes: Sequence[Node], geometries: Sequence[Geometry]) -> tuple[GraphNode, ...]:
    """Of a closed trace: its nodes that do work, in the order of their recording. `geometries` by register."""
    accesses: defaultdict[int, list[_Access]] = defaultdict(list)
    found: list[GraphNode] = []
    for node in nodes:
        if node.kind in (Kind.VIEW, Kind.ALLOCATION):
            continue
        index, before = len(found), set()
        for register, writes in _touched(node):
            geometry = geometries[register]
            access, earlier = _Access(index, *_extent(geometry), writes), accesses[geometry.storage]
            before |= {other.node for other in earlier if other.conflicts(access)}
            earlier[:] = [other for other in earlier if other.node == index or not other.is_covered_by(access)]
            earlier.append(access)
        found.append(
            GraphNode(
                index,
                "operator",
                str(node.func).removesuffix(".default"),
                detail=_signature(node, geometries),
                depends_on=tuple(sorted(before - {index})),
            )
        )
    return tuple(found)


def _arguments(node: Node) -> Iterator[tuple[Any, Any]]:
    """(parameter of the schema, value) of what was passed."""
    for position, parameter in enumerate(node.func._schema.arguments):
        if position < len(node.args):
            yield parameter, node.args[position]
        elif parameter.name in node.kwargs:
            yield parameter, node.kwargs[parameter.name]


def _touched(node: Node) -> Iterator[tuple[int, bool]]:
    """(register, whether it is written)."""
    for parameter, value in _arguments(node):
        writes = parameter.alias_info is not None and parameter.alias_info.is_write
        yield from ((leaf.index, writes) for leaf in leaves(value) if isinstance(leaf, Register))
    yield from ((index, True) for index in node.outputs if index >= 0)


def _extent(geometry: Geometry) -> tuple[int, int]:
    width = geometry.dtype.itemsize
    if 0 in geometry.size:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(geometry.size, geometry.stride, strict=True))
    return geometry.offset * width, (geometry.offset + last + 1) * width


def _signature(node: Node, geometries: Sequence[Geometry]) -> str:
    """`float32[1,64], float32[64], 1e-05 -> float32[1,64]`; a `!` after what is written in place."""
    passed = []
    for parameter, value in _arguments(node):
        mark = "!" if parameter.alias_info is not None and parameter.alias_info.is_write else ""
        passed.append(_text(value, geometries) + mark)
    made = [_text(Register(index), geometries) for index in node.outputs if index >= 0]
    return ", ".join(passed) + (f" -> {', '.join(made)}" if made else "")


def _text(value: Any, geometries: Sequence[Geometry]) -> str:
    if isinstance(value, Register):
        geometry = geometries[value.index]
        return f"{_short(geometry.dtype)}[{','.join(map(str, geometry.size))}]"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item, geometries) for item in value)}]"
    return _short(value) if isinstance(value, torch.dtype) else f"{value:g}" if isinstance(value, float) else str(value)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
