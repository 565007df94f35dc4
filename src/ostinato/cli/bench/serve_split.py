"""A load test's requests from several processes: one Python process reads some twenty thousand chunks a second."""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from typing import Any

from ostinato.cli.bench.serve_client import Client, Target
from ostinato.cli.bench.serve_drive import Clock, WallClock, run_closed, run_jobs
from ostinato.cli.bench.serve_load import Job
from ostinato.cli.bench.serve_stats import Outcome
from ostinato.errors import OstinatoError

_START_S = 60.0
_LOOK_S = 1.0


def run_split(
    jobs: Sequence[Job],
    target: Target,
    num_processes: int,
    max_concurrency: int | None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None,
    on_outcome: Callable[[Outcome], None],
) -> tuple[list[Outcome], float]:
    """The outcomes, in the order of the jobs, and the largest share of its time that a process was busy.

    Each process has a share of `max_concurrency`, which is at least one each. In a closed loop, where nothing but
    `max_concurrency` holds a request back, the processes take jobs from one row, in order, whoever has a free place;
    else process i has jobs i, i + num_processes, ... All begin together. Raises OstinatoError if one of them dies.
    """
    context = multiprocessing.get_context("spawn")
    begin, results = context.Barrier(num_processes), context.Queue()
    is_closed = max_concurrency is not None and all(job.due_s == 0 for job in jobs)
    taken = context.Value("q", 0) if is_closed else None
    workers = []
    for index in range(num_processes):
        part = jobs if is_closed else jobs[index::num_processes]
        cap = None if max_concurrency is None else share(max_concurrency, num_processes, index)
        args = (Part(part, cap, taken), target, loop_factory, begin, results)
        workers.append(context.Process(target=_work, args=args, daemon=True))
    for worker in workers:
        worker.start()
    outcomes: list[Outcome] = []
    busy: list[float] = []
    try:
        while len(busy) < num_processes:
            try:
                result = results.get(timeout=_LOOK_S)
            except queue.Empty:
                if any(worker.exitcode for worker in workers):
                    raise OstinatoError("a process of the load test died: the errors above say why") from None
                continue
            if isinstance(result, Outcome):
                outcomes.append(result)
                on_outcome(result)
            else:
                busy.append(result)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    return sorted(outcomes, key=lambda outcome: outcome.index), max(busy)


def share(total: int, num_processes: int, index: int) -> int:
    """Of `total`, as even as can be: the shares add up to it."""
    return total // num_processes + (index < total % num_processes)


@dataclass(frozen=True, slots=True)
class Part:
    """What one process sends. With `taken`, the number of jobs that all processes have taken, `jobs` are theirs in
    common and there is a `max_concurrency`."""

    jobs: Sequence[Job]
    max_concurrency: int | None
    taken: Synchronized[int] | None

    def take(self) -> Job | None:
        """The next of the common jobs, which is then nobody else's; None after the last."""
        assert self.taken is not None
        with self.taken.get_lock():  # for microseconds: it does not hold up the event loop
            index = self.taken.value
            self.taken.value = index + 1
        return self.jobs[index] if index < len(self.jobs) else None

    async def run(self, client: Client, clock: Clock, on_outcome: Callable[[Outcome], None]) -> None:
        if self.taken is None:
            await run_jobs(self.jobs, client.send, clock, self.max_concurrency, on_outcome)
        else:
            assert self.max_concurrency is not None
            await run_closed(self.take, client.send, clock, self.max_concurrency, on_outcome)


def _work(
    part: Part,
    target: Target,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None,
    begin: Barrier,
    results: Queue[Any],
) -> None:
    async def work() -> float:
        async with Client(target) as client:
            begin.wait(_START_S)
            before, clock = time.process_time(), WallClock()
            await part.run(client, clock, results.put)
            return (time.process_time() - before) / clock.now()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        results.put(runner.run(work()))
