"""Steps that were planned and not yet collected, and what nobody may reuse until they are (the fences).

A launched step reads and writes rows and blocks that the host may have let go of since. So what is freed while steps
are in flight is held until the newest of them, at the time of freeing, has been collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ostinato.errors import OstinatoError
from ostinato.request import Request
from ostinato.step import StepPlan

__all__ = ["Held", "InFlight"]


@dataclass(frozen=True, slots=True)
class Held:
    """A row and a block table that are nobody's, held until the step `fence` has been collected."""

    fence: int
    slot: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Step:
    step_id: int
    requests: tuple[Request, ...]  # of each row: ids alone would not do, an id may be used again while the step runs


class InFlight:
    """The steps in flight, oldest first, and what is held behind them."""

    __slots__ = ("_held", "_steps")

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        self._held: deque[Held] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def held_tables(self) -> list[Sequence[int]]:
        return [held.block_ids for held in self._held]

    def add(self, plan: StepPlan, requests: Sequence[Request]) -> None:
        self._steps.append(_Step(plan.step_id, tuple(requests)))

    def collect(self, step_id: int) -> tuple[Request, ...]:
        """The oldest step is done: the requests of its rows. Raises OstinatoError for any other step."""
        if not self._steps or self._steps[0].step_id != step_id:
            expected = f"step {self._steps[0].step_id} is next" if self._steps else "no step is in flight"
            raise OstinatoError(f"step {step_id} was collected out of order: {expected}")
        return self._steps.popleft().requests

    def drop(self, step_id: int) -> tuple[Request, ...]:
        """A step will never be collected: the requests of its rows. Raises OstinatoError for an unknown step."""
        for step in self._steps:
            if step.step_id == step_id:
                self._steps.remove(step)
                return step.requests
        raise OstinatoError(f"step {step_id} is not in flight")

    def clear(self) -> None:
        """None of them will ever be collected. What is held behind them is due."""
        self._steps.clear()

    def involves(self, request: Request) -> bool:
        """Whether a step in flight runs tokens of this request."""
        return any(request is other for step in self._steps for other in step.requests)

    def hold(self, slot: int, block_ids: Sequence[int]) -> None:
        """Keep a row and its blocks behind the newest step in flight; behind nothing when there is none."""
        self._held.append(Held(self._steps[-1].step_id if self._steps else -1, slot, block_ids))

    def due(self) -> Iterator[Held]:
        """Hand over, in the order of freeing, everything whose fence has been collected."""
        while self._held and (not self._steps or self._held[0].fence < self._steps[0].step_id):
            yield self._held.popleft()
