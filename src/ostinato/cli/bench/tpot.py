"""Time per output token of one engine, by batch size.

The protocol: for each batch, `num_runs` timings of one output token and of `output_len` output tokens; what the
further tokens took, divided by their number, is the time per output token. Prompts are random ids, new ones for every
timing; greedy, no stop, no text. Prefix caching has to be off.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostinato.request import SamplingParams

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM
    from ostinato.engine.stats import RecordingStat
    from ostinato.graphs.dispatch import StepCount

LOWEST_ID, HIGHEST_ID = 10, 10_000


@dataclass(frozen=True, slots=True)
class Workload:
    prompt_len: int
    output_len: int
    num_runs: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one batch size. `spread_ms` is from the fastest to the slowest run.

    `runtime_mode` and `padded_rows` say what most decode steps ran as. `graph_launches` and `eager_calls` are what
    the host starts for one of them (None where it is called eagerly: as many launches as the step has kernels), and
    `kernel_nodes` is what those graphs hold.
    """

    batch: int
    tpot_min_ms: float
    tpot_median_ms: float
    spread_ms: float
    ttft_ms: float
    runtime_mode: str
    padded_rows: int
    graph_launches: int | None
    eager_calls: int | None
    kernel_nodes: int | None


class Prompts:
    """Random token ids, the same ones in every process."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._ids = range(min(LOWEST_ID, vocab_size - 1), min(HIGHEST_ID, vocab_size))
        self._rng = random.Random(seed)

    def draw(self, num_tokens: int) -> list[int]:
        return self._rng.choices(self._ids, k=num_tokens)


def generate_s(llm: LLM, prompts: Prompts, batch: int, prompt_len: int, output_len: int) -> float:
    """Seconds that a batch of new prompts takes, from handing it over to its last token."""
    batch_ids = [prompts.draw(prompt_len) for _ in range(batch)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len, detokenize=False)
    start = time.perf_counter()
    llm.generate(batch_ids, params)
    return time.perf_counter() - start


def num_timings(batches: Sequence[int], workload: Workload) -> int:
    """How often `measure_batch` calls `on_run`, over all batches."""
    return len(batches) * (1 + 2 * workload.num_runs)


def measure_batch(llm: LLM, batch: int, workload: Workload, prompts: Prompts, on_run: Callable[[], None]) -> Timing:
    """`on_run` is called after each timing."""

    def timed(output_len: int) -> float:
        seconds = generate_s(llm, prompts, batch, workload.prompt_len, output_len)
        on_run()
        return seconds

    timed(min(8, workload.output_len))
    before = llm.stats().steps
    ones = [timed(1) for _ in range(workload.num_runs)]
    many = [timed(workload.output_len) for _ in range(workload.num_runs)]
    after = llm.stats()
    step = _usual_step(steps_between(before, after.steps), batch)
    recording = find_recording(after.recordings, step)
    ms = 1e3 / (workload.output_len - 1)
    return Timing(
        batch=batch,
        tpot_min_ms=(min(many) - min(ones)) * ms,
        tpot_median_ms=(statistics.median(many) - statistics.median(ones)) * ms,
        spread_ms=(max(many) - min(many)) * ms,
        ttft_ms=min(ones) * 1e3,
        runtime_mode=step.mode,
        padded_rows=batch if step.key is None else step.key.num_tokens,
        graph_launches=None if recording is None else recording.num_graphs,
        eager_calls=None if recording is None else recording.num_graphs - 1,  # one at each cut
        kernel_nodes=None if recording is None else recording.num_nodes,
    )


def steps_between(before: Sequence[StepCount], after: Sequence[StepCount]) -> list[StepCount]:
    """What `after` counts and `before` does not."""
    seen = {(step.mode, step.key, step.reason): step for step in before}
    new = []
    for step in after:
        old = seen.get((step.mode, step.key, step.reason))
        if old is not None:
            step = dataclasses.replace(
                step,
                count=step.count - old.count,
                live_tokens=step.live_tokens - old.live_tokens,
                padded_tokens=step.padded_tokens - old.padded_tokens,
            )
        if step.count:
            new.append(step)
    return new


def _usual_step(steps: Sequence[StepCount], batch: int) -> StepCount:
    """The kind of decode step that most were: one that came most often with `batch` tokens each."""
    decode = [step for step in steps if step.live_tokens == batch * step.count]
    return max(decode or steps, key=lambda step: step.count)


def find_recording(recordings: Sequence[RecordingStat], step: StepCount) -> RecordingStat | None:
    """What a step replayed, or None when it ran eagerly."""
    if step.key is None:
        return None
    key = (step.key.num_tokens, step.key.num_rows, step.key.query_len)
    return next((r for r in recordings if r.mode == step.mode and (r.num_tokens, r.num_rows, r.query_len) == key), None)
