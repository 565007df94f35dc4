"""What may listen to the runner's steps, for measurements. Where nobody does it costs the runner a comparison."""

from __future__ import annotations

from typing import Protocol

from ostinato.graphs.dispatch import Decision
from ostinato.step import StepPlan


class StepObserver(Protocol):
    """Called by the runner's thread, steps in the order of their launch. What it does delays the step by as much.

    `launching` comes after the host's differences were sent and before the step itself is started, with how it will
    run; `launched` right after that; `waiting` and `collected` stand around the wait for the oldest step. A step whose
    launch fails is never collected.
    """

    def launching(self, plan: StepPlan, decision: Decision) -> None: ...

    def launched(self, plan: StepPlan) -> None: ...

    def waiting(self, plan: StepPlan) -> None: ...

    def collected(self, plan: StepPlan) -> None: ...
