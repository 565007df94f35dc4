"""The CPU twin of CUDA graphs: records operators instead of launches, under the same rules.

Recording executes nothing, so it has no effect by construction. A replay runs the recorded operators over registers,
reads and writes what existed before the recording at its address, and writes the recording's outputs (tensors made in
it that are still alive when it ends) where they are. Before the first replay, outputs hold poison.

Stricter than CUDA where CUDA goes wrong in silence: a tensor from before the recording must be registered in `Statics`
or be the output of an earlier graph, and every replay checks that what it is about to read has not moved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.errors import CaptureError
from ostinato.graphs.bits import poison_
from ostinato.graphs.nodes import GraphNode
from ostinato.graphs.source import calling_line
from ostinato.graphs.statics import Statics, stale
from ostinato.graphs.tape_nodes import tape_nodes
from ostinato.graphs.tape_program import Program
from ostinato.graphs.tape_rules import HostReads, refuse_unrepeatable
from ostinato.graphs.tape_shapes import Shapes
from ostinato.graphs.tape_trace import Trace, typed

__all__ = ["TapeBackend", "TapeGraph"]


@dataclass(frozen=True, slots=True)
class _Guard:
    """A static tensor that a graph uses, as `current` returns it now, and where it was when recorded."""

    name: str
    address: int
    current: Callable[[], torch.Tensor]


class TapeGraph:
    """A recorded trace, made ready to run at its first replay: by then it is known which outputs are in use."""

    def __init__(self, trace: Trace, guards: Sequence[_Guard]) -> None:
        self.num_nodes = trace.num_launches
        self._guards = tuple(guards)
        self._trace: Trace | None = trace
        self._program: Program | None = None
        self._retained = dict(trace.memories)
        # what `nodes` needs, which is no memory of a tensor: the trace itself goes at the first replay
        self._listing = (trace.nodes, trace.geometries)

    def nodes(self) -> tuple[GraphNode, ...]:
        """The recorded operators, without views and allocations, which do no work."""
        return tape_nodes(*self._listing)

    def settle(self) -> None:
        """Gives up outputs that nobody refers to any more, as memory of a pool that is free for the next graph."""
        if self._trace is not None:
            self._trace.drop_unused()
            self._retained = dict(self._trace.memories)

    @property
    def retained(self) -> tuple[torch.UntypedStorage, ...]:
        """The memory of its outputs."""
        return tuple(memory.storage for memory in self._retained.values())

    def replay(self) -> None:
        """Runs it. Raises StaleGraphError, by name, if a static tensor that it uses moved."""
        for guard in self._guards:
            now = guard.current().data_ptr()
            if now != guard.address:
                raise stale(guard.name, guard.address, now)
        # Inference mode: outputs may have been recorded in it, and may then only be written in it.
        with torch.inference_mode():
            if self._program is None:
                self._program = self._compile()
            self._program.run()

    def _compile(self) -> Program:
        assert self._trace is not None
        self.settle()
        program, self._trace = Program(self._trace), None
        return program


class TapeBackend:
    """Records tapes on the CPU. All graphs of one backend share a pool: a graph may read what an earlier one wrote."""

    name = "tape"
    needs_warm_up = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._shapes = Shapes()
        self._recording: _TapeMode | None = None
        self._modes = ExitStack()
        self._graphs: weakref.WeakSet[TapeGraph] = weakref.WeakSet()
        self._unsettled: list[weakref.ref[TapeGraph]] = []
        self._pool: dict[int, weakref.ref[TapeGraph]] = {}  # by storage: the graph whose output it is

    def begin(self, statics: Statics) -> None:
        if self._recording is not None:
            raise CaptureError("a graph is being recorded already: end() or abort() it first")
        self._recording = _TapeMode(self.device, self._shapes, statics, self._owns)
        self._modes.enter_context(HostReads())
        self._modes.enter_context(self._recording)

    def end(self) -> TapeGraph:
        recording = self._stop()
        if recording is None:
            raise CaptureError("no graph is being recorded: begin() one first")
        recording.trace.close()
        with torch.inference_mode():
            for memory in recording.trace.memories.values():
                poison_(typed(memory))
        graph = TapeGraph(recording.trace, recording.guards)
        self._settle(final=False)
        self._graphs.add(graph)
        self._unsettled.append(weakref.ref(graph))
        for storage in graph.retained:
            self._pool[storage._cdata] = weakref.ref(graph)
        return graph

    def abort(self) -> None:
        self._stop()

    def memory(self) -> int:
        """Bytes of all outputs that are still in use."""
        self._settle(final=True)
        return sum(storage.nbytes() for graph in self._graphs for storage in graph.retained)

    def close(self) -> None:
        """Memory goes with the graphs."""

    def synchronize(self) -> None:
        """Replays are done when they return."""

    def warm_up_context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def is_capture_fault(self, error: BaseException) -> bool:
        return False  # it raises CaptureError itself

    def _stop(self) -> _TapeMode | None:
        recording, self._recording = self._recording, None
        self._modes.close()
        return recording

    def _settle(self, *, final: bool) -> None:
        """Frees what the recordings so far do not use any more. `final`: and will not come to; do not look again."""
        for reference in self._unsettled:
            graph = reference()
            if graph is not None:
                graph.settle()
        if final:
            self._unsettled.clear()

    def _owns(self, storage: torch.UntypedStorage) -> bool:
        graph = self._pool.get(storage._cdata, _nothing)()
        return graph is not None and any(storage._cdata == kept._cdata for kept in graph.retained)


def _nothing() -> None:
    return None


class _TapeMode(TorchDispatchMode):
    """Sends every operator to a trace, down to those that are not made of others."""

    def __init__(
        self, device: torch.device, shapes: Shapes, statics: Statics, owns: Callable[[torch.UntypedStorage], bool]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace(device, shapes, self._admit)
        self.guards: list[_Guard] = []
        self._statics = statics
        self._names = statics.index()
        self._guarded: set[str] = set()
        self._owns = owns

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it means importing it, which takes seconds, and nothing here is compiled

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose() and torch.Tag.data_dependent_output not in func.tags:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        refuse_unrepeatable(func, args, kwargs)
        return self.trace.record(func, args, kwargs)

    def _admit(self, tensor: torch.Tensor) -> None:
        """Lets a tensor from before the recording into the graph, if its memory is known to stay."""
        storage = tensor.untyped_storage()
        if tensor.numel() == 0 or self._owns(storage):
            return
        name = self._names.find(tensor)
        if name is None:
            raise CaptureError(
                f"{calling_line()}: a new static input inside a recording: a {tensor.dtype} tensor of shape "
                f"{tuple(tensor.shape)} from before it, which nobody keeps in place. Register it with statics.add(), "
                "copy it into a registered buffer, or make it inside the step"
            )
        if name not in self._guarded:
            self._guarded.add(name)
            statics = self._statics
            self.guards.append(_Guard(name, statics.current(name).data_ptr(), lambda: statics.current(name)))
        if tensor is not self._statics.current(name):
            self.guards.append(_Guard(name, tensor.data_ptr(), lambda: tensor))
