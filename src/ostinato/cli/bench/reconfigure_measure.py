"""What recording costs a running engine: at the start, at a change, and put off until it is asked for.

Each function measures one engine in the process that it is called in. Times of steps are from the end of the step
before to the step's own end, as a client sees its tokens come.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.cli.bench.record import spread
from ostinato.cli.bench.tpot import Prompts
from ostinato.engine.llm import LLM
from ostinato.errors import OstinatoError
from ostinato.graphs.dispatch import Decision
from ostinato.request import SamplingParams
from ostinato.step import StepPlan

OpenLLM = Callable[..., LLM]

_WARM_STEPS = 3
"""Decode steps that are left out of medians: those before the pipeline of steps in flight is full."""


@dataclass(frozen=True, slots=True)
class SeenStep:
    plan: StepPlan
    decision: Decision
    done_at: float
    ms: float


class StepClock:
    """A `StepObserver`. `steps` are those that were collected, in order."""

    def __init__(self) -> None:
        self.steps: list[SeenStep] = []
        self._decisions: dict[int, Decision] = {}
        self._last = time.perf_counter()

    def launching(self, plan: StepPlan, decision: Decision) -> None:
        self._decisions[plan.step_id] = decision

    def launched(self, plan: StepPlan) -> None:
        """Told by `launching`."""

    def waiting(self, plan: StepPlan) -> None:
        """The end is what counts."""

    def collected(self, plan: StepPlan) -> None:
        now = time.perf_counter()
        self.steps.append(SeenStep(plan, self._decisions.pop(plan.step_id), now, 1e3 * (now - self._last)))
        self._last = now


def eager_and_changes(open_llm: OpenLLM, job: dict[str, Any]) -> dict[str, Any]:
    """A start that records all, then each of `changes` while `running` requests decode `steps` steps around it."""
    began = time.perf_counter()
    with open_llm(**job["options"], capture="eager") as llm:
        start = _start_facts(llm, began)
        prompts, engine = Prompts(job["vocab_size"]), llm.engine
        names = [f"running-{index}" for index in range(job["running"])]
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=llm.stats().max_model_len - job["prompt_len"],
            detokenize=False,
        )
        for name in names:
            engine.add_request(name, prompts.draw(job["prompt_len"]), params)
        while engine.scheduler.num_waiting:
            engine.step()
        changes = []
        for change in job["changes"]:
            _steps(llm, job["steps"])
            changes.append({"options": change} | _change(llm, change))
        _steps(llm, job["steps"])
        for name in names:
            engine.abort(name)
    return {"start": start, "changes": changes}


def _change(llm: LLM, change: dict[str, Any]) -> dict[str, Any]:
    """One change; `pause_ms` is from the last token before it to the first after it."""
    engine = llm.engine
    engine.settle()
    before = time.perf_counter()
    done = llm.reconfigure(**change)
    clock = StepClock()
    engine.runner.observe(clock)
    while not clock.steps:
        engine.step()
    pause = clock.steps[0].done_at - before
    engine.settle()
    engine.runner.observe(None)
    return {
        "seconds": done.seconds,
        "pause_ms": 1e3 * pause,
        "recorded": [dataclasses.asdict(line) for line in done.recorded],
        "recording_s": sum(line.seconds for line in done.recorded),
        "recording_bytes": done.recording_bytes,
        "kept": done.kept,
        "dropped": done.dropped,
        "preempted": done.preempted,
        "num_blocks": done.num_blocks,
        "num_running": engine.scheduler.num_running,
    }


def _steps(llm: LLM, count: int) -> None:
    for _ in range(count):
        if any(delta.finished for delta in llm.engine.step()):
            raise OstinatoError("a request reached the model length before all was measured: lower --steps")


def lazy(open_llm: OpenLLM, job: dict[str, Any]) -> dict[str, Any]:
    """A start that puts recordings off, and for each batch the first decode step that would have used its key beside
    those that use it later, when the engine has had a moment to record it."""
    began = time.perf_counter()
    with open_llm(**job["options"], capture="lazy") as llm:
        start = _start_facts(llm, began)
        prompts, hits = Prompts(job["vocab_size"]), []
        for batch in job["batches"]:
            known = {(line.mode, line.num_tokens) for line in llm.stats().recordings}
            first = _decode_steps(llm, prompts, batch, job["prompt_len"], job["steps"])
            while llm.engine.idle():
                pass
            later = _decode_steps(llm, prompts, batch, job["prompt_len"], job["steps"])
            ran = later[-1].decision
            new = [line for line in llm.stats().recordings if (line.mode, line.num_tokens) not in known]
            hits.append(
                {
                    "batch": batch,
                    "first_ms": first[0].ms,
                    "first_mode": first[0].decision.mode.value,
                    "first_reason": first[0].decision.reason.value,
                    "slowest_ms": max(step.ms for step in first),
                    "later_ms": spread([step.ms for step in later[_WARM_STEPS:]]),
                    "later_mode": ran.mode.value,
                    "later_rows": ran.key.num_rows,
                    "recorded": [dataclasses.asdict(line) for line in new],
                }
            )
    return {"start": start, "hits": hits}


def _decode_steps(llm: LLM, prompts: Prompts, batch: int, prompt_len: int, count: int) -> list[SeenStep]:
    """At least `count` steps in which `batch` requests decoded one token each, prompts that are prefilled left out."""
    engine, clock = llm.engine, StepClock()
    wanted = count + _WARM_STEPS
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=llm.stats().max_model_len - prompt_len, detokenize=False
    )
    names = [f"hit-{index}" for index in range(batch)]
    engine.settle()
    engine.runner.observe(clock)
    try:
        for name in names:
            engine.add_request(name, prompts.draw(prompt_len), params)
        while True:
            deltas = engine.step()
            found = [step for step in clock.steps if step.plan.num_rows == batch and step.plan.query_len == 1]
            if len(found) >= wanted:
                return found
            if any(delta.finished for delta in deltas) or not engine.has_unfinished:
                raise OstinatoError(
                    f"{batch} requests did not decode {wanted} steps together: the KV cache or the model length does "
                    "not hold them; lower --batch, --prompt-len or --steps"
                )
    finally:
        for name in names:
            engine.abort(name)
        engine.settle()
        engine.runner.observe(None)


def background(open_llm: OpenLLM, job: dict[str, Any]) -> dict[str, Any]:
    """Seconds until the engine is ready, and, without a request, until everything is recorded."""
    began = time.perf_counter()
    with open_llm(**job["options"], capture="background") as llm:
        start = _start_facts(llm, began)
        pieces: list[float] = []
        last = time.perf_counter()
        while llm.engine.idle():
            now = time.perf_counter()
            pieces.append(now - last)
            last = now
        stats = llm.stats()
    return {
        "start": start,
        "all_recorded_s": last - began,
        "num_recordings": stats.num_recordings,
        "num_not_recorded": stats.num_pending,
        "recording_bytes": stats.recording_bytes,
        "recorded_later": len(pieces),
        "longest_piece_s": max(pieces, default=0.0),
        "recordings": [dataclasses.asdict(line) for line in stats.recordings],
    }


def _start_facts(llm: LLM, began: float) -> dict[str, Any]:
    stats = llm.stats()
    return {
        "ready_s": time.perf_counter() - began,
        "startup_s": stats.startup_s,
        "mode": stats.resolved_mode,
        "backend": stats.backend,
        "capture_s": stats.capture_s,
        "num_recordings": stats.num_recordings,
        "num_pending": stats.num_pending,
        "recording_bytes": stats.recording_bytes,
        "num_blocks": stats.num_blocks,
        "recordings": [dataclasses.asdict(line) for line in stats.recordings],
    }


def median_ms(recordings: Sequence[dict[str, Any]]) -> float:
    """Of the seconds that each took; 0 without any."""
    return 1e3 * statistics.median([line["seconds"] for line in recordings]) if recordings else 0.0
