"""An engine over `OffloadingConnector` whose prefix cache can be put into the states that `kv_transfer.py` measures.

What a request finds in the pool's free blocks decides what its start costs: nothing, content that may be forgotten, or
content that must be copied to host memory first. Here each is made on purpose, and each request says what it met.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from decoding import UnexpectedError
from ostinato import LLM, SamplingParams
from ostinato.cli.bench.tpot import Prompts
from ostinato.engine.output import Delta, OutputState
from ostinato.graphs.dispatch import Decision
from ostinato.graphs.mode import RuntimeMode
from ostinato.kernels import ops
from ostinato.step import StepPlan

MAX_FILLERS = 200


@dataclass(frozen=True, slots=True)
class Step:
    """In blocks: `loads`, which the step waits for, `async_loads`, which begin with it, and `saves`, which make room.
    `key` is None for an eager step."""

    mode: str
    key: str | None
    reason: str
    rows: int
    tokens: int
    loads: int
    async_loads: int
    saves: int


class StepList:
    """A step observer that keeps how each step ran."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def launching(self, plan: StepPlan, decision: Decision) -> None:
        meta: Any = plan.connector_meta
        self.steps.append(
            Step(
                mode=decision.mode.value,
                key=None if decision.mode is RuntimeMode.NONE else decision.key.name,
                reason=decision.reason.value,
                rows=plan.num_rows,
                tokens=plan.num_tokens,
                loads=0 if meta is None else len(meta.loads),
                async_loads=0 if meta is None else sum(len(load.copies) for load in meta.async_loads),
                saves=0 if meta is None else len(meta.saves) + sum(len(load.saves) for load in meta.async_loads),
            )
        )

    def launched(self, plan: StepPlan) -> None:
        """Nothing to add."""

    def waiting(self, plan: StepPlan) -> None:
        """Nothing to add."""

    def collected(self, plan: StepPlan) -> None:
        """Nothing to add."""


@dataclass(slots=True)
class Copied:
    """All copies of one direction: bytes, and for each run of layers the moments before and after it."""

    num_bytes: int = 0
    spans: list[tuple[Any, Any]] = field(default_factory=list)

    def seconds(self) -> float:
        """The device's time on CUDA, which must be done with them; the host's elsewhere."""
        return float(
            sum(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3 for begin, end in self.spans)
        )


@dataclass(slots=True)
class CopyTimes:
    loads: Copied = field(default_factory=Copied)
    saves: Copied = field(default_factory=Copied)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request that ran alone. `ttft_s` from handing it over to its first token, which `steps` gave."""

    ttft_s: float
    token_ids: list[int]
    cached_tokens: int
    loaded_blocks: int
    loaded_bytes: int
    load_s: float
    saved_bytes: int
    save_s: float
    steps: list[Step]

    def facts(self) -> dict[str, Any]:
        """For a report."""
        return asdict(self)


class Offload:
    """Prompts are of ids below `vocab_size`."""

    def __init__(self, llm: LLM, num_layers: int, vocab_size: int) -> None:
        self.llm, self.engine = llm, llm.engine
        self._num_layers = num_layers
        self._prompts = Prompts(vocab_size)
        self._cuda = llm.stats().device.startswith("cuda")
        self._num_requests = 0

    def draw(self, num_tokens: int) -> list[int]:
        """A prompt that was never seen."""
        return self._prompts.draw(num_tokens)

    def add(self, prompt: list[int], max_tokens: int) -> OutputState:
        """Greedy, no stop, no text."""
        self._num_requests += 1
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, detokenize=False)
        return self.engine.add_request(f"r{self._num_requests}", prompt, params)

    def quiet(self) -> None:
        """No step and no copy is under way afterwards. The next step returns what those that were gave."""
        self.engine.settle()
        if self._cuda:
            torch.cuda.synchronize()
        self.engine.poll_connector()

    def finish(self) -> None:
        """Steps until no request is left."""
        while self.engine.has_unfinished:
            self.engine.step()
        self.quiet()

    def forget(self) -> None:
        """The pool's free blocks hold nothing that can be found or must be saved; host memory keeps what it has."""
        self.engine.scheduler.kv.forget_contents()

    def num_blank(self) -> int:
        return len(self.engine.scheduler.kv.states().free)

    def num_saved(self) -> int:
        return self._connector_stats("saved_blocks")

    def num_loaded(self) -> int:
        return self._connector_stats("loaded_blocks")

    def num_async(self) -> int:
        """Requests that were loaded for beside the steps."""
        return self._connector_stats("async_loads")

    def _connector_stats(self, name: str) -> int:
        stats = self.llm.stats().connector
        assert stats is not None
        return int(getattr(stats, name))

    def fillers(self, longest: int) -> Iterator[OutputState]:
        """Requests one after another, never seen, until every free block holds content that host memory lacks. The
        caller steps each to its end. Raises UnexpectedError if that does not come about."""
        block_size = self.llm.stats().block_size
        for _ in range(MAX_FILLERS):
            blank = self.num_blank()
            if blank == 0:
                return
            yield self.add(self.draw(min(blank, longest // block_size) * block_size), 1)
        raise UnexpectedError(f"{self.num_blank()} free blocks are still without content after {MAX_FILLERS} prompts")

    def evict_all(self, longest: int) -> None:
        """By prompts never seen: as many tokens as the pool holds, and one more prompt. Nothing may run."""
        stats = self.llm.stats()
        for _ in range(-(-stats.num_blocks * stats.block_size // longest) + 1):
            self.add(self.draw(longest // stats.block_size * stats.block_size), 1)
            self.finish()

    def fill_all(self, longest: int) -> None:
        """Nothing may run."""
        for _ in self.fillers(longest):
            self.finish()

    def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        """Runs the request alone."""
        self.quiet()
        loaded = self.num_loaded()
        with self.observed() as seen, self.timed_copies() as copies:
            began = time.perf_counter()
            state = self.add(prompt, max_tokens)
            while not _gives(self.engine.step(), state):
                pass
            ttft = time.perf_counter() - began
            self.finish()
        return Answer(
            ttft_s=ttft,
            token_ids=list(state.request.output_token_ids),
            cached_tokens=state.request.num_cached_tokens,
            loaded_blocks=self.num_loaded() - loaded,
            loaded_bytes=copies.loads.num_bytes,
            load_s=copies.loads.seconds(),
            saved_bytes=copies.saves.num_bytes,
            save_s=copies.saves.seconds(),
            steps=seen.steps[: _num_steps(seen.steps, len(prompt) - state.request.num_cached_tokens)],
        )

    @contextmanager
    def observed(self) -> Iterator[StepList]:
        """How each step that is launched inside runs. Nothing is in flight when it begins and when it ends."""
        seen = StepList()
        self.engine.settle()
        self.engine.runner.observe(seen)
        try:
            yield seen
        finally:
            self.engine.settle()
            self.engine.runner.observe(None)

    @contextmanager
    def timed_copies(self) -> Iterator[CopyTimes]:
        """Every copy that the connector begins inside, on its own stream."""
        times, original = CopyTimes(), ops.copy_blocks
        pool = self.engine.runner.storage.pool.data_ptr()
        loading: list[Any] = []  # when the load that is under way began: its layers come one after another

        def copy_blocks(
            source: torch.Tensor,
            target: torch.Tensor,
            source_ids: torch.Tensor,
            target_ids: torch.Tensor,
            first_layer: int,
            num_layers: int,
        ) -> None:
            load = target.data_ptr() == pool
            copied = times.loads if load else times.saves
            copied.num_bytes += source_ids.numel() * num_layers * source.shape[2]
            begin = loading.pop() if load and first_layer > 0 else self._now()
            original(source, target, source_ids, target_ids, first_layer, num_layers)
            if load and first_layer + num_layers < self._num_layers:
                loading.append(begin)
            else:
                copied.spans.append((begin, self._now()))

        ops.copy_blocks = copy_blocks
        try:
            yield times
        finally:
            self.quiet()
            ops.copy_blocks = original

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _num_steps(steps: list[Step], num_tokens: int) -> int:
    """How many of them it takes for so many tokens."""
    done = 0
    for number, step in enumerate(steps, 1):
        done += step.tokens
        if done >= num_tokens:
            return number
    raise UnexpectedError(f"{len(steps)} steps ran {done} tokens of {num_tokens}")


def _gives(deltas: list[Delta], state: OutputState) -> bool:
    return any(delta.request_id == state.request.request_id for delta in deltas)


def open_offload(shape: Path, **options: Any) -> LLM:
    """Random weights for the shape in `shape/config.json`."""
    return LLM(str(shape), load_format="dummy", enable_prefix_caching=True, **options)
