"""Drives an LLM step by step and keeps what every step did.

R rows of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ostinato import LLM, SamplingParams
from ostinato.engine.output import OutputState
from ostinato.graphs.dispatch import Decision
from ostinato.runner.runner import InFlight
from ostinato.step import StepPlan

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
ALWAYS = 1_000_000
"""As `check`: every replay is compared with its eager twin."""


def greedy(max_tokens: int | None, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


@dataclass(frozen=True, slots=True)
class SeenStep:
    plan: StepPlan
    decision: Decision
    logits: torch.Tensor  # [R, V], of the live rows


@dataclass(slots=True)
class Drive:
    """The outputs of a drive, in the order of submission, and its steps."""

    outputs: list[OutputState] = field(default_factory=list)
    steps: list[SeenStep] = field(default_factory=list)

    @property
    def tokens(self) -> list[list[int]]:
        return [output.request.output_token_ids for output in self.outputs]

    def logits_by_request(self) -> Iterator[tuple[OutputState, int, torch.Tensor]]:
        """(request, position, logits [V]) of every live row: the logits predict the token at position + 1."""
        by_id = {output.request.request_id: output for output in self.outputs}
        for step in self.steps:
            for index, row in enumerate(step.plan.rows):
                yield by_id[row.request_id], row.start + row.num_tokens - 1, step.logits[index]


@contextmanager
def launches(llm: LLM) -> Iterator[list[InFlight]]:
    """Every step launched meanwhile."""
    runner, seen = llm.engine.runner, []
    original: Callable[[StepPlan], InFlight] = runner.launch

    def launch(plan: StepPlan) -> InFlight:
        seen.append(original(plan))
        return seen[-1]

    runner.launch = launch  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        runner.launch = original  # type: ignore[method-assign]


def drive(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    name: str = "r",
    after_step: Callable[[SeenStep], None] | None = None,
    arrivals: Sequence[int] | None = None,
) -> Drive:
    """Runs the prompts to their ends with one step in flight. `arrivals[i]` is the step before which i is submitted."""
    engine, seen = llm.engine, Drive()
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    due = list(arrivals) if arrivals is not None else [0] * len(prompts)
    assert due == sorted(due)
    num_steps = 0
    with launches(llm) as launched:
        while len(seen.outputs) < len(prompts) or engine.has_unfinished:
            while (index := len(seen.outputs)) < len(prompts) and due[index] <= num_steps:
                seen.outputs.append(engine.add_request(f"{name}-{index}", list(prompts[index]), each[index]))
            before = len(launched)
            engine.step()
            num_steps += 1
            for step in launched[before:]:
                num_rows = step.plan.num_rows
                live = llm.engine.runner.buffers.logits[:num_rows].float().cpu().clone()
                seen.steps.append(SeenStep(step.plan, step.decision, live))
                if after_step is not None:
                    after_step(seen.steps[-1])
    return seen


def counts_of(llm: LLM) -> dict[tuple[str, int | None, str], int]:
    """Steps by (mode, tokens of the key, reason)."""
    found: dict[tuple[str, int | None, str], int] = {}
    for row in llm.stats().steps:
        index = (row.mode, row.key.num_tokens if row.key else None, row.reason)
        found[index] = found.get(index, 0) + row.count
    return found


def modes_of(llm: LLM) -> set[str]:
    return {row.mode for row in llm.stats().steps}
