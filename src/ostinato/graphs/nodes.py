"""What a graph holds, node by node, for people: the same form on every backend. No torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Dim3", "GraphNode"]

Dim3 = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node of a graph, in an order in which the nodes may run.

    `kind`: kernel, memcpy, memset, host, graph, empty, event wait, event record and the like on CUDA, operator on the
    tape. `grid` and `block` in blocks and threads, `registers` of each thread, `shared_bytes` of each block, static and
    dynamic together: None where there is no such thing. `detail` is what else there is to say, as text. `depends_on`
    are indices of nodes of the same graph that must have run. `layer` is None unless somebody has found out.
    """

    index: int
    kind: str
    name: str
    layer: int | None = None
    grid: Dim3 | None = None
    block: Dim3 | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    detail: str = ""
    depends_on: tuple[int, ...] = ()
