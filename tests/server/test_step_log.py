"""The log of steps on a made-up clock, and its two steps in flight."""

from __future__ import annotations

from ostinato.engine.step_log import NUM_KEPT, StepLog
from ostinato.graphs.dispatch import BatchKey, Decision, Reason
from ostinato.graphs.mode import RuntimeMode
from ostinato.step import RowPlan, StepPlan

GRAPH = Decision(RuntimeMode.FULL, BatchKey(4, 4, 1), Reason.PADDED)
EAGER = Decision(RuntimeMode.NONE, BatchKey(3, 3, 1), Reason.GRAPHS_OFF)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, tuple(RowPlan(f"r{slot}", slot, step_id, 1, True) for slot in range(3)))


def test_a_step_is_told_when_it_is_over() -> None:
    log = StepLog(Clock())
    assert log.after(0) == (0, [])
    log.launching(plan(0), GRAPH)
    log.launched(plan(0))
    assert log.after(0) == (0, [])
    log.launching(plan(1), EAGER)
    log.waiting(plan(0))
    log.collected(plan(0))
    last, (first,) = log.after(0)
    assert last == 1
    assert first == (1, 1000001.0, 1000003.0, "FULL", BatchKey(4, 4, 1), "padded", 3, 3, 4)
    assert log.after(1) == (1, [])
    log.collected(plan(1))
    last, (second,) = log.after(1)
    assert last == 2
    assert (second.mode, second.key, second.tokens, second.padded_tokens) == ("NONE", None, 3, 3)


def test_a_step_that_never_ended_is_told_by_the_next() -> None:
    log = StepLog(Clock())
    for step_id in range(3):
        log.launching(plan(step_id), GRAPH)
    log.collected(plan(0))
    log.collected(plan(2))
    last, steps = log.after(0)
    assert last == 3
    assert [step.collected_ms is None for step in steps] == [False, True, False]


def test_the_oldest_are_forgotten() -> None:
    log = StepLog(Clock())
    for step_id in range(NUM_KEPT + 10):
        log.launching(plan(step_id), GRAPH)
        log.collected(plan(step_id))
    last, steps = log.after(0)
    assert last == NUM_KEPT + 10
    assert [step.id for step in steps] == list(range(11, NUM_KEPT + 11))
    assert len(log.after(last - 3)[1]) == 3
