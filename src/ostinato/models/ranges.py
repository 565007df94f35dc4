"""Names for what a step launches: a range for each step, layer and cut, pushed and popped on the host.

A profiler that keeps where a graph's nodes were created (Nsight Systems: `--cuda-graph-trace=node`) thus knows the
layer of each node of a recording, although nothing is pushed when it is replayed. What runs between graphs has its
range each time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Protocol, TypeVar

T = TypeVar("T")

Cut = Callable[[str, Callable[[], None]], None]


class RangeSink(Protocol):
    """Where ranges go: `torch.cuda.nvtx`, or whatever has its two functions."""

    def range_push(self, msg: str) -> object: ...

    def range_pop(self) -> object: ...


class LayerRanges:
    """One thread, one step at a time."""

    def __init__(self, sink: RangeSink) -> None:
        self._sink = sink
        self._layer: int | None = None

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        self._sink.range_push(name)
        try:
            yield
        finally:
            self._sink.range_pop()

    @contextmanager
    def layers(self, each: Iterable[T]) -> Iterator[Iterator[T]]:
        """Goes through the layers of a model; the body of the loop runs in the range `layer N`."""
        with closing(self._layers(each)) as found:
            yield found

    def _layers(self, each: Iterable[T]) -> Generator[T, None, None]:
        try:
            for self._layer, one in enumerate(each):
                with self.named(f"layer {self._layer}"):
                    yield one
        finally:
            self._layer = None

    def cuts(self, cut: Cut) -> Cut:
        """The same with a range around what is cut out, such as `layer N attention` or `head`, wherever it runs."""

        def named_cut(name: str, op: Callable[[], None]) -> None:
            where = name if self._layer is None else f"layer {self._layer} {name}"
            cut(name, partial(self._run, where, op))

        return named_cut

    def _run(self, name: str, op: Callable[[], None]) -> None:
        with self.named(name):
            op()
