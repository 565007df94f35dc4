"""Host time and idle GPU from what an observer saw, on made-up clocks and on a real engine's steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ostinato import LLM, SamplingParams
from ostinato.cli.bench.steps import StepTimes, StepWatch, step_cost, watching
from ostinato.graphs.dispatch import BatchKey, Decision, Reason
from ostinato.graphs.mode import RuntimeMode
from ostinato.step import RowPlan, StepPlan

PERIOD, BUSY, WAIT, OBSERVED = 1e-3, 0.9e-3, 0.6e-3, 0.05e-3


def steady(count: int, *, first_s: float = 0.0, gpu: bool = True, decode: bool = True) -> list[StepTimes]:
    return [
        StepTimes(
            is_decode=decode,
            collected_at_s=first_s + (index + 1) * PERIOD,
            waited_s=WAIT,
            observed_s=OBSERVED,
            gpu_start_s=first_s + index * PERIOD if gpu else None,
            gpu_end_s=first_s + index * PERIOD + BUSY if gpu else None,
        )
        for index in range(count)
    ]


def test_steady_steps() -> None:
    cost = step_cost(steady(12))
    assert cost is not None
    assert cost.num_steps == 12 - 4 - 1
    assert cost.host_us == pytest.approx(1e6 * (PERIOD - WAIT - OBSERVED))
    assert cost.idle_us == pytest.approx(1e6 * (PERIOD - BUSY))
    assert cost.idle_share == pytest.approx(0.1)


def test_what_is_not_steady_is_left_out() -> None:
    prefill = [replace(step, waited_s=0.0, gpu_end_s=step.gpu_start_s) for step in steady(5, decode=False)]
    decode = steady(12, first_s=1.0)
    late = replace(decode[0], gpu_end_s=decode[0].gpu_start_s)  # the first decode step, at the edge
    assert step_cost([*prefill, late, *decode[1:], *steady(3, first_s=2.0, decode=False)]) == step_cost(decode)


def test_a_late_host_shows_as_idle_gpu() -> None:
    steps = steady(8)
    delay = 0.4e-3
    moved = [
        replace(
            step,
            collected_at_s=step.collected_at_s + delay,
            gpu_start_s=(step.gpu_start_s or 0.0) + delay,
            gpu_end_s=(step.gpu_end_s or 0.0) + delay,
        )
        for step in steps[4:]
    ]
    cost = step_cost([*steps[:4], *moved])
    assert cost is not None
    assert cost.idle_us == pytest.approx(1e6 * (3 * (PERIOD - BUSY) + delay) / 3)
    assert cost.idle_share == pytest.approx((3 * (PERIOD - BUSY) + delay) / (3 * PERIOD + delay))
    assert cost.host_us == pytest.approx(1e6 * (PERIOD - WAIT - OBSERVED + delay / 3))


def test_no_events_no_idle_share() -> None:
    cost = step_cost(steady(9, gpu=False))
    assert cost is not None
    assert (cost.idle_us, cost.idle_share) == (None, None)
    assert cost.host_us > 0


@pytest.mark.parametrize("count", [0, 1, 5])
def test_too_few_steps(count: int) -> None:
    assert step_cost(steady(count)) is None
    assert step_cost(steady(6)) is not None


class Event:
    """A timed event of a clock that moves by one millisecond with every event."""

    now = 0.0

    def __init__(self) -> None:
        Event.now += 1.0
        self.at_ms = Event.now

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


def test_events_belong_to_their_step_with_two_in_flight() -> None:
    watch = StepWatch(1, Event)  # type: ignore[arg-type]
    plans = [StepPlan(step_id, (RowPlan("r", 0, step_id, 1, True),)) for step_id in range(4)]
    for ahead, plan in enumerate(plans):
        watch.launching(plan, Decision(RuntimeMode.FULL, BatchKey(1, 1, 1), Reason.EXACT))
        watch.launched(plan)
        if ahead:
            watch.waiting(plans[ahead - 1])
            watch.collected(plans[ahead - 1])
    steps = watch.steps()
    assert [(step.gpu_start_s, step.gpu_end_s) for step in steps] == [(0.0, 0.001), (0.002, 0.003), (0.004, 0.005)]
    assert all(step.is_decode for step in steps)
    assert 0 < steps[0].collected_at_s < steps[1].collected_at_s < steps[2].collected_at_s


def test_the_runner_tells_its_observer_of_every_step(model: str) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=9)
    prompts = [[1, 2, 3], [4, 5, 6]]
    with LLM(
        model,
        load_format="dummy",
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
        max_in_flight=2,
    ) as llm:
        alone = llm.generate(prompts, params)
        before = sum(step.count for step in llm.stats().steps)
        with watching(llm, 2) as watch:
            observed = llm.generate(prompts, params)
        seen = watch.steps()
        assert len(seen) == sum(step.count for step in llm.stats().steps) - before
        assert [step.is_decode for step in seen[:9]] == [False] + [True] * 8
        llm.generate(prompts, params)
        assert len(watch.steps()) == len(seen)
    assert [output.outputs[0].token_ids for output in observed] == [output.outputs[0].token_ids for output in alone]


class Listener:
    """Everything that a step observer hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def launching(self, plan: StepPlan, decision: Decision) -> None:
        self.heard.append(("launching", plan.step_id))

    def launched(self, plan: StepPlan) -> None:
        self.heard.append(("launched", plan.step_id))

    def waiting(self, plan: StepPlan) -> None:
        self.heard.append(("waiting", plan.step_id))

    def collected(self, plan: StepPlan) -> None:
        self.heard.append(("collected", plan.step_id))


def test_the_order_of_what_an_observer_hears(model: str) -> None:
    with LLM(
        model, load_format="dummy", device="cpu", max_num_seqs=2, max_num_batched_tokens=16, max_in_flight=2
    ) as llm:
        listener = Listener()
        llm.engine.runner.observe(listener)
        llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        llm.engine.settle()
    launches = [(what, step) for what, step in listener.heard if what.startswith("launch")]
    waits = [(what, step) for what, step in listener.heard if not what.startswith("launch")]
    first, count = launches[0][1], len(launches) // 2
    assert count >= 4
    order = range(first, first + count)
    assert launches == [(what, step) for step in order for what in ("launching", "launched")]
    assert waits == [(what, step) for step in order for what in ("waiting", "collected")]
    assert listener.heard.index(("launched", first + 1)) < listener.heard.index(("waiting", first))
