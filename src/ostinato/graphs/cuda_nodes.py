"""The nodes of a captured CUDA graph, as the driver tells of them.

Everything here asks and changes nothing. `Bindings` is `cuda.bindings`, of CUDA 12 or 13: a module each for the runtime
and the driver, whose functions return a status and then what the C function writes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ostinato.errors import OstinatoError
from ostinato.graphs.nodes import Dim3, GraphNode

__all__ = ["Bindings", "count_nodes", "cuda_nodes", "load_bindings"]


class Bindings(NamedTuple):
    runtime: Any
    driver: Any


class _Function(NamedTuple):
    name: str
    registers: int
    static_shared_bytes: int


@dataclass(slots=True)
class _Edges:
    """By node: what it depends on, and whether it may start before one of these has ended."""

    depends_on: list[list[int]]
    starts_early: list[bool]


def load_bindings() -> Bindings:
    from cuda.bindings import driver, runtime

    return Bindings(runtime, driver)


def count_nodes(graph: int, bindings: Bindings) -> int:
    """Of the graph with this handle. Raises OstinatoError with the driver's status where it refuses."""
    handle = bindings.runtime.cudaGraph_t(init_value=graph)
    _, count = _ask(bindings.runtime.cudaGraphGetNodes(handle), "cudaGraphGetNodes")
    return int(count)


def cuda_nodes(graph: int, bindings: Bindings, demangle: Callable[[str], str] | None = None) -> tuple[GraphNode, ...]:
    """All nodes of the graph with this handle, each after those it depends on. `demangle(name)`: how to show C++ names.

    Raises OstinatoError with the driver's status where it refuses to tell.
    """
    runtime = bindings.runtime
    handle = runtime.cudaGraph_t(init_value=graph)
    count = count_nodes(graph, bindings)
    if not count:
        return ()
    raw, _ = _ask(runtime.cudaGraphGetNodes(handle, count), "cudaGraphGetNodes")
    edges = _edges(runtime, handle, {int(node): index for index, node in enumerate(raw)})
    order = _dependency_order(edges.depends_on)
    place = {old: new for new, old in enumerate(order)}
    reader = _Reader(bindings, demangle or str)
    return tuple(
        reader.read(
            index,
            raw[old],
            tuple(sorted(place[before] for before in edges.depends_on[old])),
            edges.starts_early[old],
        )
        for index, old in enumerate(order)
    )


def _edges(runtime: Any, handle: Any, index: dict[int, int]) -> _Edges:
    # CUDA 13 tells of each edge's kind. In CUDA 12 only the second version does, and the first one refuses graphs that
    # have programmatic edges. Both have the count last.
    get = getattr(runtime, "cudaGraphGetEdges_v2", runtime.cudaGraphGetEdges)
    found = _Edges([[] for _ in index], [False] * len(index))
    *_, count = _ask(get(handle), "cudaGraphGetEdges")
    if not count:
        return found
    sources, targets, *data, _ = _ask(get(handle, count), "cudaGraphGetEdges")
    kinds = [int(edge.type) for edge in data[0]] if data else [0] * len(sources)
    for source, target, kind in zip(sources, targets, kinds, strict=True):
        after = index[int(target)]
        found.depends_on[after].append(index[int(source)])
        found.starts_early[after] |= kind == int(runtime.cudaGraphDependencyType.cudaGraphDependencyTypeProgrammatic)
    return found


def _dependency_order(depends_on: list[list[int]]) -> list[int]:
    """An order that respects the edges, and the driver's own where they leave a choice."""
    left = [len(before) for before in depends_on]
    dependents: list[list[int]] = [[] for _ in depends_on]
    for node, before in enumerate(depends_on):
        for other in before:
            dependents[other].append(node)
    ready = [node for node, count in enumerate(left) if not count]
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for dependent in dependents[node]:
            left[dependent] -= 1
            if not left[dependent]:
                heapq.heappush(ready, dependent)
    return order


class _Reader:
    """Asks about one node at a time; of each kernel's function only once."""

    def __init__(self, bindings: Bindings, demangle: Callable[[str], str]) -> None:
        self._runtime, self._driver = bindings
        self._demangle = demangle
        self._functions: dict[int, _Function] = {}
        self._kinds = {
            int(kind): _words(kind.name.removeprefix("cudaGraphNodeType")) for kind in self._runtime.cudaGraphNodeType
        }

    def read(self, index: int, node: Any, depends_on: tuple[int, ...], starts_early: bool) -> GraphNode:
        (number,) = _ask(self._runtime.cudaGraphNodeGetType(node), "cudaGraphNodeGetType")
        kind = self._kinds.get(int(number), f"node of type {int(number)}")
        if kind == "kernel":
            return self._kernel(index, node, depends_on, starts_early)
        detail = {"memcpy": self._memcpy, "memset": self._memset, "graph": self._child}.get(kind)
        return GraphNode(index, kind, kind, detail="" if detail is None else detail(node), depends_on=depends_on)

    def _kernel(self, index: int, node: Any, depends_on: tuple[int, ...], starts_early: bool) -> GraphNode:
        driver = self._driver
        (params,) = _ask(
            driver.cuGraphKernelNodeGetParams(driver.CUgraphNode(init_value=int(node))), "cuGraphKernelNodeGetParams"
        )
        function, dynamic = self._function(params), int(params.sharedMemBytes)
        grid: Dim3 = (int(params.gridDimX), int(params.gridDimY), int(params.gridDimZ))
        block: Dim3 = (int(params.blockDimX), int(params.blockDimY), int(params.blockDimZ))
        notes = []
        if function.static_shared_bytes and dynamic:
            notes.append(f"shared memory {function.static_shared_bytes} static, {dynamic} dynamic")
        if starts_early:
            notes.append("programmatic launch")
        return GraphNode(
            index,
            "kernel",
            self._demangle(function.name),
            grid=grid,
            block=block,
            registers=function.registers,
            shared_bytes=function.static_shared_bytes + dynamic,
            detail="; ".join(notes),
            depends_on=depends_on,
        )

    def _function(self, params: Any) -> _Function:
        driver, function = self._driver, params.func
        if not int(function):  # loaded lazily through a library: the node has the kernel's handle instead
            (function,) = _ask(driver.cuKernelGetFunction(params.kern), "cuKernelGetFunction")
        known = self._functions.get(int(function))
        if known is None:
            attribute = driver.CUfunction_attribute
            (name,) = _ask(driver.cuFuncGetName(function), "cuFuncGetName")
            (registers,) = _ask(
                driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, function), "cuFuncGetAttribute"
            )
            (shared,) = _ask(
                driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function), "cuFuncGetAttribute"
            )
            known = _Function(name.decode(errors="replace"), int(registers), int(shared))
            self._functions[int(function)] = known
        return known

    def _memcpy(self, node: Any) -> str:
        (params,) = _ask(self._runtime.cudaGraphMemcpyNodeGetParams(node), "cudaGraphMemcpyNodeGetParams")
        extent, kind = params.extent, _words(params.kind.name.removeprefix("cudaMemcpy"))
        return f"{kind}, {int(extent.width) * int(extent.height) * int(extent.depth)} bytes"

    def _memset(self, node: Any) -> str:
        (params,) = _ask(self._runtime.cudaGraphMemsetNodeGetParams(node), "cudaGraphMemsetNodeGetParams")
        size = int(params.width) * int(params.height) * int(params.elementSize)
        return f"{size} bytes, value {int(params.value)}"

    def _child(self, node: Any) -> str:
        (child,) = _ask(self._runtime.cudaGraphChildGraphNodeGetGraph(node), "cudaGraphChildGraphNodeGetGraph")
        return f"{count_nodes(int(child), Bindings(self._runtime, self._driver))} nodes"


def _words(name: str) -> str:
    """`EventRecord` -> `event record`."""
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()


def _ask(answer: tuple[Any, ...], function: str) -> tuple[Any, ...]:
    """What came with the status."""
    status, *values = answer
    if int(status) != 0:
        raise OstinatoError(f"the nodes of a captured graph cannot be read: {function} says {status}")
    return tuple(values)
