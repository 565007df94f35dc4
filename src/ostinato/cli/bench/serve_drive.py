"""Sends each request when it is due: a slow server does not slow the arrivals, unless concurrency is capped."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from ostinato.cli.bench.serve_load import Job
from ostinato.cli.bench.serve_stats import Outcome


class Clock(Protocol):
    """Seconds since the first request is due."""

    def now(self) -> float: ...

    async def sleep_until(self, moment: float) -> None:
        """Returns at `moment` or later."""
        ...


class WallClock:
    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def sleep_until(self, moment: float) -> None:
        while (left := moment - self.now()) > 0:  # a loop's timers are coarse, and may be early
            await asyncio.sleep(left)


Send = Callable[[Job, Clock], Awaitable[Outcome]]


async def run_jobs(
    jobs: Sequence[Job],
    send: Send,
    clock: Clock,
    max_concurrency: int | None = None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """The outcomes, in the order of the jobs, which are in the order of `due_s`.

    With `max_concurrency`, a request that is due waits for its turn, first come first served, and its latencies begin
    when it is sent.
    """
    cap = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def carry_out(job: Job) -> Outcome:
        async with cap:
            outcome = await send(job, clock)
        on_outcome(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = []
        for job in jobs:
            if clock.now() < job.due_s:
                await clock.sleep_until(job.due_s)
            tasks.append(group.create_task(carry_out(job)))
    return [task.result() for task in tasks]


async def run_closed(
    take: Callable[[], Job | None],
    send: Send,
    clock: Clock,
    num_places: int,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> None:
    """A closed loop: each place sends what `take` gives it, and the next as soon as that is answered, until None.

    Several loops whose `take` draws from one row of jobs are together one loop of as many places as they have.
    """

    async def serve_place() -> None:
        while (job := take()) is not None:
            on_outcome(await send(job, clock))

    async with asyncio.TaskGroup() as group:
        for _ in range(num_places):
            group.create_task(serve_place())
