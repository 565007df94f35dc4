"""The nodes of a CUDA graph, read through a double of `cuda.bindings` that answers as versions 12 and 13 do."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato.errors import OstinatoError
from ostinato.graphs.cuda_nodes import Bindings, count_nodes, cuda_nodes


class Status(enum.IntEnum):
    OK = 0
    INVALID = 1


class NodeType(enum.IntEnum):
    """As `cudaGraphNodeType` names and numbers them."""

    cudaGraphNodeTypeKernel = 0
    cudaGraphNodeTypeMemcpy = 1
    cudaGraphNodeTypeMemset = 2
    cudaGraphNodeTypeHost = 3
    cudaGraphNodeTypeGraph = 4
    cudaGraphNodeTypeWaitEvent = 6
    cudaGraphNodeTypeEventRecord = 7


class DependencyType(enum.IntEnum):
    cudaGraphDependencyTypeDefault = 0
    cudaGraphDependencyTypeProgrammatic = 1


class MemcpyKind(enum.IntEnum):
    cudaMemcpyDeviceToDevice = 3


class Attribute(enum.IntEnum):
    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1
    CU_FUNC_ATTRIBUTE_NUM_REGS = 4


class Handle:
    """`int(handle)` is its address; a new one is made of that."""

    def __init__(self, init_value: int = 0) -> None:
        self._value = init_value

    def __int__(self) -> int:
        return self._value


@dataclass
class Function:
    name: bytes
    registers: int
    shared: int


@dataclass
class FakeCuda:
    """Graph 1 has `nodes` (address -> type, parameters) and `edges`; functions and kernels by address."""

    nodes: dict[int, tuple[NodeType, Any]]
    edges: list[tuple[int, int, int]]
    functions: dict[int, Function] = field(default_factory=dict)
    kernels: dict[int, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def bindings(self, version: int) -> Bindings:
        runtime = SimpleNamespace(
            cudaGraph_t=Handle,
            cudaGraphNodeType=NodeType,
            cudaGraphDependencyType=DependencyType,
            cudaGraphGetNodes=self._get_nodes,
            cudaGraphNodeGetType=lambda node: (Status.OK, self.nodes[int(node)][0]),
            cudaGraphMemcpyNodeGetParams=self._params,
            cudaGraphMemsetNodeGetParams=self._params,
            cudaGraphChildGraphNodeGetGraph=lambda node: (Status.OK, Handle(1)),
        )
        if version == 13:
            runtime.cudaGraphGetEdges = self._get_edges
        else:
            runtime.cudaGraphGetEdges = self._get_plain_edges
            runtime.cudaGraphGetEdges_v2 = self._get_edges
        driver = SimpleNamespace(
            CUgraphNode=Handle,
            CUfunction_attribute=Attribute,
            cuGraphKernelNodeGetParams=self._params,
            cuKernelGetFunction=lambda kernel: (Status.OK, Handle(self.kernels[int(kernel)])),
            cuFuncGetName=self._name,
            cuFuncGetAttribute=self._attribute,
        )
        return Bindings(runtime, driver)

    def _get_nodes(self, graph: Handle, numNodes: int = 0) -> tuple[Any, ...]:
        if int(graph) != 1:
            return Status.INVALID, None, None
        return Status.OK, [Handle(address) for address in self.nodes][:numNodes], len(self.nodes)

    def _get_edges(self, graph: Handle, numEdges: int = 0) -> tuple[Any, ...]:
        edges = self.edges[:numEdges]
        data = [SimpleNamespace(type=kind) for _, _, kind in edges]
        return Status.OK, [Handle(a) for a, _, _ in edges], [Handle(b) for _, b, _ in edges], data, len(self.edges)

    def _get_plain_edges(self, graph: Handle, numEdges: int = 0) -> tuple[Any, ...]:
        """Of CUDA 12: without data, and refused (cudaErrorLossyQuery) for graphs that have some."""
        if any(kind for _, _, kind in self.edges):
            return Status.INVALID, None, None, None
        status, sources, targets, _, count = self._get_edges(graph, numEdges)
        return status, sources, targets, count

    def _params(self, node: Handle) -> tuple[Any, ...]:
        return Status.OK, self.nodes[int(node)][1]

    def _name(self, function: Handle) -> tuple[Any, ...]:
        self.asked.append(self.functions[int(function)].name.decode())
        return Status.OK, self.functions[int(function)].name

    def _attribute(self, attribute: Attribute, function: Handle) -> tuple[Any, ...]:
        known = self.functions[int(function)]
        is_registers = attribute is Attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        return Status.OK, known.registers if is_registers else known.shared


def kernel(func: int, *, kern: int = 0, grid: int = 1, dynamic: int = 0) -> tuple[NodeType, Any]:
    sizes = {"gridDimX": grid, "gridDimY": 2, "gridDimZ": 1, "blockDimX": 128, "blockDimY": 1, "blockDimZ": 1}
    params = SimpleNamespace(func=Handle(func), kern=Handle(kern), sharedMemBytes=dynamic, **sizes)
    return NodeType.cudaGraphNodeTypeKernel, params


@pytest.fixture
def cuda() -> FakeCuda:
    """prepare -> memset -> few (programmatic after it) -> copy; the driver tells of the copy before its kernel."""
    memset = SimpleNamespace(width=16, height=2, elementSize=4, value=7)
    copy = SimpleNamespace(
        kind=MemcpyKind.cudaMemcpyDeviceToDevice, extent=SimpleNamespace(width=64, height=1, depth=1)
    )
    return FakeCuda(
        nodes={
            0x10: kernel(0xA, grid=4),
            0x20: (NodeType.cudaGraphNodeTypeMemset, memset),
            0x30: (NodeType.cudaGraphNodeTypeMemcpy, copy),
            0x40: kernel(0, kern=0xC, dynamic=1024),
            0x50: kernel(0xA),
        },
        edges=[(0x10, 0x20, 0), (0x20, 0x40, 0), (0x10, 0x40, 1), (0x40, 0x30, 0), (0x40, 0x50, 1)],
        functions={0xA: Function(b"prepare_kernel", 32, 0), 0xB: Function(b"_Z3fewv", 168, 512)},
        kernels={0xC: 0xB},
    )


@pytest.mark.parametrize("version", [12, 13])
def test_nodes_in_an_order_in_which_they_may_run(cuda: FakeCuda, version: int) -> None:
    bindings = cuda.bindings(version)
    assert count_nodes(1, bindings) == 5
    nodes = cuda_nodes(1, bindings, demangle=lambda name: "few()" if name.startswith("_Z") else name)
    assert [node.index for node in nodes] == [0, 1, 2, 3, 4]
    assert [node.name for node in nodes] == ["prepare_kernel", "memset", "few()", "memcpy", "prepare_kernel"]
    assert [node.kind for node in nodes] == ["kernel", "memset", "kernel", "memcpy", "kernel"]
    assert [node.depends_on for node in nodes] == [(), (0,), (0, 1), (2,), (2,)]
    prepare, memset, few, copy, last = nodes
    assert (prepare.grid, prepare.block, prepare.registers, prepare.shared_bytes) == ((4, 2, 1), (128, 1, 1), 32, 0)
    assert (few.registers, few.shared_bytes) == (168, 1536)
    assert few.detail == "shared memory 512 static, 1024 dynamic; programmatic launch"
    assert (memset.detail, memset.grid) == ("128 bytes, value 7", None)
    assert copy.detail == "device to device, 64 bytes"
    assert last.detail == "programmatic launch"
    assert cuda.asked == ["prepare_kernel", "_Z3fewv"]  # of each function once


@pytest.mark.parametrize(
    ("type", "kind", "detail"),
    [
        (NodeType.cudaGraphNodeTypeWaitEvent, "wait event", ""),
        (NodeType.cudaGraphNodeTypeEventRecord, "event record", ""),
        (NodeType.cudaGraphNodeTypeHost, "host", ""),
        (NodeType.cudaGraphNodeTypeGraph, "graph", "1 nodes"),
        (99, "node of type 99", ""),
    ],
)
def test_other_kinds(type: Any, kind: str, detail: str) -> None:
    [node] = cuda_nodes(1, FakeCuda({0x10: (type, None)}, []).bindings(13))
    assert (node.kind, node.name, node.detail) == (kind, kind, detail)


def test_an_empty_graph_has_none() -> None:
    assert cuda_nodes(1, FakeCuda({}, []).bindings(12)) == ()


def test_a_refusal_names_the_function_and_the_status(cuda: FakeCuda) -> None:
    with pytest.raises(OstinatoError, match="cudaGraphGetNodes says"):
        cuda_nodes(2, cuda.bindings(13))


def test_the_real_bindings_have_these_names() -> None:
    """No device is needed to look, but the package is."""
    pytest.importorskip("cuda.bindings", reason="needs the package cuda-bindings")
    from ostinato.graphs.cuda_nodes import load_bindings

    real, fake = load_bindings(), FakeCuda({}, []).bindings(13)
    for ours, theirs in zip(fake, real, strict=True):
        assert not [name for name in vars(ours) if not hasattr(theirs, name)]
    assert {kind.name: int(kind) for kind in NodeType}.items() <= {
        kind.name: int(kind) for kind in real.runtime.cudaGraphNodeType
    }.items()
    assert {name for name in vars(kernel(1)[1])} <= set(dir(real.driver.CUDA_KERNEL_NODE_PARAMS()))
    assert int(real.driver.CUgraphNode(init_value=int(real.runtime.cudaGraphNode_t(init_value=7)))) == 7
