"""CUDA graphs: one memory pool, one capture stream, any number of captures over them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch

from ostinato.errors import CaptureError
from ostinato.graphs.cuda_nodes import count_nodes, cuda_nodes, load_bindings
from ostinato.graphs.nodes import GraphNode
from ostinato.graphs.statics import Statics

__all__ = ["CudaBackend", "CudaGraph"]


class _Streams:
    """Streams of backends that were closed, for the next ones. cuBLAS keeps a workspace for every stream that it was
    ever used on (64 MiB on Hopper), and torch can only free those of all streams at once, some of which other
    engines' graphs point into: so a process has as many as it had backends at one time, and not one for each."""

    def __init__(self) -> None:
        self._free: dict[torch.device, list[torch.cuda.Stream]] = {}
        self._lock = threading.Lock()

    def take(self, device: torch.device) -> torch.cuda.Stream:
        with self._lock:
            free = self._free.setdefault(device, [])
            if free:
                return free.pop()
        with torch.cuda.device(device):
            return torch.cuda.Stream()

    def give_back(self, stream: torch.cuda.Stream) -> None:
        with self._lock:
            self._free.setdefault(torch.device("cuda", stream.device_index), []).append(stream)


_STREAMS = _Streams()


class CudaGraph:
    """An instantiated `torch.cuda.CUDAGraph`; replays run on the current stream."""

    def __init__(self, graph: torch.cuda.CUDAGraph, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.raw = graph
        # Launches it and does not wait. The bound method itself: a step is short enough to save a Python frame.
        self.replay: Callable[[], None] = graph.replay if num_nodes else _nothing

    def nodes(self) -> tuple[GraphNode, ...]:
        """What was captured. Asks the driver about every node, so a thousand of them take a moment."""
        demangle = getattr(torch._C, "_demangle", None)
        return cuda_nodes(self.raw.raw_cuda_graph(), load_bindings(), demangle)


class CudaBackend:
    """Captures on one stream of `device` into one pool. Whatever is captured in it shares the pool's memory."""

    name = "cuda"
    needs_warm_up = True

    def __init__(self, device: torch.device | str = "cuda") -> None:
        index = torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._stream = _STREAMS.take(self.device)
        self._closed = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._context = ExitStack()
        self._open_pool()

    def _open_pool(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # A pool dies with its last graph, and an aborted recording could be the last: this one, empty, outlives all.
        self.begin(Statics())
        self._anchor = self.end()

    def begin(self, statics: Statics) -> None:
        if self._graph is not None:
            raise CaptureError("a graph is being recorded already: end() or abort() it first")
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # kept, so that its nodes can be counted and shown
        self._context.enter_context(torch.cuda.device(self.device))
        self._context.enter_context(torch.cuda.stream(self._stream))
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            self._context.close()
            raise
        self._graph = graph

    def end(self) -> CudaGraph:
        graph = self._graph
        if graph is None:
            raise CaptureError("no graph is being recorded: begin() one first")
        _end(graph)  # where this raises, abort() cleans up
        self._graph = None
        self._context.close()
        num_nodes = count_nodes(graph.raw_cuda_graph(), load_bindings())
        if num_nodes:
            graph.instantiate()
        return CudaGraph(graph, num_nodes)

    def abort(self) -> None:
        graph, self._graph = self._graph, None
        if graph is None:
            return
        failed = False
        try:
            _end(graph)
        except RuntimeError:
            failed = True
            # Ending a failed capture raises, but is what frees the stream. Up to torch 2.12 it leaves the allocators of
            # device and pinned memory believing that the pool is still being recorded to. The first can be told; for
            # the second the pool's id is spent, so later recordings get a new one. Graphs keep the pool they are in.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
        self._context.close()
        torch.cuda.synchronize(self.device)
        if failed:
            self._open_pool()

    def memory(self) -> int:
        """Bytes of the device in use. Executable graphs are the driver's, so this asks it and not the allocator."""
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Nothing is recorded or replayed any more. Safe to call twice."""
        if not self._closed:
            self._closed = True
            _STREAMS.give_back(self._stream)

    @contextmanager
    def warm_up_context(self) -> Iterator[None]:
        """The capture stream: cuBLAS keeps a workspace per stream, and it must exist before the capture."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def is_capture_fault(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError) and "captur" in str(error).lower()


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # two cuts with nothing between them
        graph.capture_end()


def _nothing() -> None:
    """The replay of a graph without nodes."""
