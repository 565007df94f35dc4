"""What the steps of an engine cost its host, and how long its GPU stands still between them.

GPU times are those of two CUDA events a step, the first right before the step is started and the second right after.
An event is reached when all before it is done, so what lies between the second one of a step and the first one of the
next is time without a step to run: the host was late, or sent its differences (a copy and a kernel, where a table
changed). Two events with nothing between them are some 2 us apart, which is the least that can be found. The launch of
a step that finds the GPU waiting is not part of it, as the step's first event is reached before.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostinato.graphs.dispatch import Decision
from ostinato.step import StepPlan

if TYPE_CHECKING:
    import torch

    from ostinato.engine.llm import LLM

_EDGE = 2
"""Decode steps left out at either end: at the first ones the pipeline fills, at the last ones it empties."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step. Seconds on the host's clock, `gpu_start_s` and `gpu_end_s` on the device's, None without events.

    `waited_s`: for the step to end. `observed_s`: what observing took since the last step was collected.
    """

    is_decode: bool
    collected_at_s: float
    waited_s: float
    observed_s: float
    gpu_start_s: float | None
    gpu_end_s: float | None


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of the steady decode steps. `idle_share` is the GPU's, of the time from one step to the next; None without."""

    num_steps: int
    host_us: float
    idle_us: float | None
    idle_share: float | None


def step_cost(steps: Sequence[StepTimes]) -> StepCost | None:
    """None where there are not enough decode steps in a row: two, and the edges."""
    first, last = _longest_run([step.is_decode for step in steps])
    steady = steps[first + _EDGE : last - _EDGE]
    if len(steady) < 2:
        return None
    pairs = list(itertools.pairwise(steady))
    host = [b.collected_at_s - a.collected_at_s - b.waited_s - b.observed_s for a, b in pairs]
    idle, period = [], []
    for a, b in pairs:
        if a.gpu_start_s is not None and a.gpu_end_s is not None and b.gpu_start_s is not None:
            idle.append(b.gpu_start_s - a.gpu_end_s)
            period.append(b.gpu_start_s - a.gpu_start_s)
    return StepCost(
        num_steps=len(pairs),
        host_us=statistics.fmean(host) * 1e6,
        idle_us=statistics.fmean(idle) * 1e6 if idle else None,
        idle_share=sum(idle) / sum(period) if idle else None,
    )


def _longest_run(flags: Sequence[bool]) -> tuple[int, int]:
    """The longest stretch of true flags, as a slice."""
    best, start = (0, 0), 0
    for index, flag in enumerate([*flags, False]):
        if not flag:
            best = max(best, (start, index), key=lambda span: span[1] - span[0])
            start = index + 1
    return best


@dataclass(slots=True)
class _Seen:
    is_decode: bool
    start: torch.cuda.Event | None
    end: torch.cuda.Event | None = None
    collected_at_s: float = 0.0
    waited_s: float = 0.0
    observed_s: float = 0.0


class StepWatch:
    """A step observer for one run of `batch` requests. `record` makes a timed event now; None leaves the GPU out."""

    def __init__(self, batch: int, record: Callable[[], torch.cuda.Event] | None) -> None:
        self._batch, self._record = batch, record
        self._launched: list[_Seen] = []
        self._num_collected = 0
        self._wait_began = 0.0
        self._observed_s = 0.0

    def launching(self, plan: StepPlan, decision: Decision) -> None:
        began = time.perf_counter()
        is_decode = plan.num_rows == self._batch and plan.query_len == 1
        self._launched.append(_Seen(is_decode, self._record() if self._record is not None else None))
        self._observed_s += time.perf_counter() - began

    def launched(self, plan: StepPlan) -> None:
        began = time.perf_counter()
        if self._record is not None:
            self._launched[-1].end = self._record()
        self._observed_s += time.perf_counter() - began

    def waiting(self, plan: StepPlan) -> None:
        self._wait_began = time.perf_counter()

    def collected(self, plan: StepPlan) -> None:
        now = time.perf_counter()
        seen = self._launched[self._num_collected]
        self._num_collected += 1
        seen.collected_at_s, seen.waited_s = now, now - self._wait_began
        seen.observed_s, self._observed_s = self._observed_s, 0.0

    def steps(self) -> list[StepTimes]:
        """All that were collected. The GPU must be done with them."""
        seen = self._launched[: self._num_collected]
        zero = seen[0].start if seen else None

        def seconds(event: torch.cuda.Event | None) -> float | None:
            return None if zero is None or event is None else float(zero.elapsed_time(event)) / 1e3

        return [
            StepTimes(s.is_decode, s.collected_at_s, s.waited_s, s.observed_s, seconds(s.start), seconds(s.end))
            for s in seen
        ]


@contextmanager
def watching(llm: LLM, batch: int) -> Iterator[StepWatch]:
    """Observes every step that is launched inside. Nothing is in flight when it begins and when it ends."""
    engine = llm.engine
    watch = StepWatch(batch, _timed_event if llm.stats().device.startswith("cuda") else None)
    engine.settle()
    engine.runner.observe(watch)
    try:
        yield watch
    finally:
        engine.settle()
        engine.runner.observe(None)


def _timed_event() -> torch.cuda.Event:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
