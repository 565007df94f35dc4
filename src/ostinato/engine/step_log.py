"""The newest steps of an engine: when each was launched and collected, and how and why it ran. No torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ostinato.graphs.dispatch import BatchKey, Decision
from ostinato.graphs.mode import RuntimeMode
from ostinato.step import StepPlan

NUM_KEPT = 512


class StepRecord(NamedTuple):
    """One step; a tuple, because every step makes two.

    `id` counts from 1. Times in ms since the epoch; `collected_ms` is None for a step that could not be launched.
    `tokens` were asked for, `padded_tokens` computed. `key` is None where the step ran eagerly.
    """

    id: int
    launched_ms: float
    collected_ms: float | None
    mode: str
    key: BatchKey | None
    reason: str
    rows: int
    tokens: int
    padded_tokens: int


class StepLog:
    """A step observer that keeps the newest `NUM_KEPT` steps. One thread: the runner's.

    `clock` gives seconds since the epoch. The default one does not jump when the system's clock is set.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or _steady_clock()
        self._steps: deque[StepRecord] = deque(maxlen=NUM_KEPT)

    def launching(self, plan: StepPlan, decision: Decision) -> None:
        eager = decision.mode is RuntimeMode.NONE
        self._steps.append(
            StepRecord(
                id=plan.step_id + 1,
                launched_ms=self._now_ms(),
                collected_ms=None,
                mode=decision.mode.value,
                key=None if eager else decision.key,
                reason=decision.reason.value,
                rows=plan.num_rows,
                tokens=plan.num_tokens,
                padded_tokens=decision.key.num_tokens,
            )
        )

    def launched(self, plan: StepPlan) -> None:
        pass

    def waiting(self, plan: StepPlan) -> None:
        pass

    def collected(self, plan: StepPlan) -> None:
        # the step is among the last few: no more are in flight
        for index in range(len(self._steps) - 1, -1, -1):
            if self._steps[index].id == plan.step_id + 1:
                self._steps[index] = self._steps[index]._replace(collected_ms=self._now_ms())
                return

    def after(self, step_id: int) -> tuple[int, Sequence[StepRecord]]:
        """The newest id, 0 without any, and the kept steps with a larger one than `step_id`, oldest first.

        The newest is the newest that has been collected: no step is told of before it is over, and a reader that goes
        on from the last id misses none.
        """
        steps = list(self._steps)
        while steps and steps[-1].collected_ms is None:
            steps.pop()
        return steps[-1].id if steps else 0, [step for step in steps if step.id > step_id]

    def _now_ms(self) -> float:
        return round(self._clock() * 1e3, 3)


def _steady_clock() -> Callable[[], float]:
    offset = time.time() - time.perf_counter()
    return lambda: offset + time.perf_counter()
