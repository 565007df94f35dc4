"""Runs a step once and keeps it as a recording: graphs, and between them the calls at which it was cut.

Where the step calls `cut(name, op)`, a recorder that cuts at `name` ends the current graph, keeps `op` as an eager
segment and begins the next graph. Nothing is executed while recording, `op` included: it returns nothing and hands its
results on in fixed buffers, so what comes after it can be recorded without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ostinato.errors import CaptureError
from ostinato.graphs.backends import Graph, GraphBackend
from ostinato.graphs.source import line_of
from ostinato.graphs.statics import Statics

__all__ = ["Cut", "EagerSegment", "GraphSegment", "Recorder", "Recording", "no_cut", "prepared"]

Cut = Callable[[str, Callable[[], None]], None]
"""`cut(name, op)`: does `op`, at a place where a recording may be cut."""


def no_cut(name: str, op: Callable[[], None]) -> None:
    """The `Cut` of an eager call: just does it."""
    op()


def prepared(op: Callable[[], None]) -> Callable[[], None]:
    """What `op.prepare()` returns, if it has such a method: the same, made ready to be called many times."""
    prepare: Callable[[], Callable[[], None]] | None = getattr(op, "prepare", None)
    return op if prepare is None else prepare()


@dataclass(frozen=True, slots=True)
class GraphSegment:
    graph: Graph

    @property
    def num_nodes(self) -> int:
        return self.graph.num_nodes

    def replay(self) -> None:
        self.graph.replay()


@dataclass(frozen=True, slots=True)
class EagerSegment:
    """What the step passed to `cut(name, op)`, prepared."""

    name: str
    op: Callable[[], None]

    def replay(self) -> None:
        self.op()


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A step, to be repeated. `addresses` are those of all static tensors when it was made."""

    segments: tuple[GraphSegment | EagerSegment, ...]
    capture_s: float
    bytes: int
    addresses: Mapping[str, int] = field(repr=False)
    # Graphs without nodes are not replayed, but what was allocated in them lives as long as they do.
    retained: tuple[Graph, ...] = field(repr=False, default=())
    calls: tuple[Callable[[], None], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        calls = tuple(
            segment.graph.replay if isinstance(segment, GraphSegment) else segment.op for segment in self.segments
        )
        object.__setattr__(self, "calls", calls)

    @property
    def num_graphs(self) -> int:
        return sum(isinstance(segment, GraphSegment) for segment in self.segments)

    @property
    def num_nodes(self) -> int:
        return sum(segment.num_nodes for segment in self.segments if isinstance(segment, GraphSegment))

    def replay(self) -> None:
        for call in self.calls:
            call()


class Recorder:
    """Makes recordings on one backend over one set of static tensors."""

    def __init__(self, backend: GraphBackend, statics: Statics) -> None:
        self.backend = backend
        self.statics = statics
        self._busy = False

    def record(self, fn: Callable[[Cut], None], cuts: frozenset[str] = frozenset()) -> Recording:
        """Records one call of `fn`, cut at the names in `cuts`. Has no effect on any tensor that existed before.

        Raises CaptureError, naming the line, where `fn` does what a graph cannot repeat; whatever `fn` raises is passed
        on. Either way nothing is kept and the recorder can be used again.
        """
        if self._busy:
            raise CaptureError("a recording was begun inside a recording: record one step at a time")
        self._busy = True
        started, retained_before = time.perf_counter(), self.backend.memory()
        segments: list[GraphSegment | EagerSegment] = []
        empty: list[Graph] = []

        def end_graph() -> None:
            graph = self.backend.end()
            if graph.num_nodes:
                segments.append(GraphSegment(graph))
            else:
                empty.append(graph)

        def cut(name: str, op: Callable[[], None]) -> None:
            if name not in cuts:
                op()
                return
            end_graph()
            segments.append(EagerSegment(name, prepared(op)))
            self.backend.begin(self.statics)

        try:
            with torch.no_grad():
                self.backend.begin(self.statics)
                fn(cut)
                end_graph()
        except BaseException as error:
            self.backend.abort()
            if not isinstance(error, CaptureError) and self.backend.is_capture_fault(error):
                raise CaptureError(
                    f"{line_of(error)}: not possible inside a recording ({error}). "
                    "Do it before the step, or behind a cut"
                ) from error
            raise
        finally:
            self._busy = False
        return Recording(
            segments=tuple(segments),
            capture_s=time.perf_counter() - started,
            bytes=max(0, self.backend.memory() - retained_before),
            addresses=self.statics.addresses(),
            retained=tuple(empty),
        )
