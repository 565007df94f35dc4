"""One load test: find the model, warm up, send, and what the client itself had to do meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

import ostinato
from ostinato.cli import variables
from ostinato.cli.bench.serve_client import Client, Target
from ostinato.cli.bench.serve_drive import WallClock, run_jobs
from ostinato.cli.bench.serve_load import Load, make_jobs, make_warm_up
from ostinato.cli.bench.serve_split import run_split
from ostinato.cli.bench.serve_stats import Outcome
from ostinato.errors import OstinatoError
from ostinato.progress import bar


class LoadTestError(OstinatoError):
    """The server does not answer the requests that the test is made of."""


@dataclass(frozen=True, slots=True)
class Measured:
    """`busy_share` is the processor time of the client over the time of the test: near 1, it measured itself."""

    model: str
    server_version: str | None
    outcomes: list[Outcome]
    busy_share: float
    client: dict[str, Any]


def measure(args: argparse.Namespace, url: str) -> Measured:
    """Raises ConfigError for a server that is not there or has no such model, LoadTestError for a failed warm-up."""
    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        return runner.run(_measure(args, Target(url, args.endpoint, args.api_key or variables.api_key(), args.timeout)))


async def _measure(args: argparse.Namespace, target: Target) -> Measured:
    async with Client(target) as client:
        load = make_load(args, await client.find_model(args.model))
        jobs = make_jobs(load)
        await warm_up(client, load, args.num_warmups)
        version = await client.find_version()
        with bar("requests", len(jobs)) as update:
            take = Tally(update).take
            if args.client_processes > 1:
                split = (jobs, target, args.client_processes, args.max_concurrency, _fast_loop(), take)
                outcomes, busy_share = await asyncio.to_thread(run_split, *split)
            else:
                before, clock = time.process_time(), WallClock()
                outcomes = await run_jobs(jobs, client.send, clock, args.max_concurrency, take)
                busy_share = (time.process_time() - before) / clock.now()
    loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    facts = {
        "ostinato": ostinato.__version__,
        "python": platform.python_version(),
        "aiohttp": aiohttp.__version__,
        "event_loop": loop,
        "processes": args.client_processes,
    }
    return Measured(load.model, version, outcomes, busy_share, facts)


def make_load(args: argparse.Namespace, model: str) -> Load:
    return Load(
        model=model,
        endpoint=args.endpoint,
        num_prompts=args.num_prompts,
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        range_ratio=args.random_range_ratio,
        request_rate=args.request_rate,
        seed=args.seed,
        vocab_size=args.vocab_size if args.token_ids else None,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        extra_body=args.extra_body,
    )


async def warm_up(client: Client, load: Load, count: int) -> None:
    """One by one. A server that fails here would fail every request of the test, so its first failure ends it."""
    clock = WallClock()
    for number in range(count):
        outcome = await client.send(make_warm_up(load, number), clock)
        if outcome.failure is not None:
            what = f"{outcome.failure}: {outcome.detail}" if outcome.detail else outcome.failure
            raise LoadTestError(f"the warm-up request failed: {what}")


class Tally:
    """The note beside the progress bar."""

    def __init__(self, update: Callable[[int, str], None]) -> None:
        self._update = update
        self._done = self._failed = self._tokens = 0
        self._clock = WallClock()

    def take(self, outcome: Outcome) -> None:
        self._done += 1
        if outcome.failure is None:
            self._tokens += outcome.output_tokens
        else:
            self._failed += 1
        failed = f", {self._failed} failed" if self._failed else ""
        self._update(self._done, f"{self._tokens / max(self._clock.now(), 1e-9):,.0f} tokens/s{failed}")


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: the client should cost as little as it can."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop
