"""Recording again while requests run, and recording between steps, on the tape backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import LLM, SamplingParams
from ostinato.engine.output import OutputState
from ostinato.errors import CaptureError, ConfigError
from ostinato.graphs.dispatch import BatchKey, LiveCount
from ostinato.graphs.mode import RuntimeMode
from ostinato.request import StructuredOutputsParams

from .conftest import TinyFactory
from .driving import ALWAYS, counts_of, greedy, launches
from .models import TinyModel, prompts_of

PROMPTS = prompts_of((5, 18, 9, 33, 2, 40, 7, 16), 160, seed=61)
PARAMS = [
    greedy(30),
    SamplingParams(temperature=1.0, seed=5, max_tokens=30, repetition_penalty=1.3, ignore_eos=True),
    greedy(30, logprobs=3),
    greedy(30, prompt_logprobs=2),
    SamplingParams(temperature=0.8, seed=9, max_tokens=30, presence_penalty=1.0, ignore_eos=True),
    greedy(30, logit_bias={7: 5.0}),
    SamplingParams(temperature=1.0, seed=1, structured_outputs=StructuredOutputsParams(regex="[a-f]{30}")),
    greedy(30, min_tokens=20, stop_token_ids=[3]),
]


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Qwen3", tokenizer=True)


def open_llm(model: TinyModel, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "num_gpu_blocks_override": 64,
        "check": ALWAYS,
        **options,
    }
    return LLM(str(model.path), **settings)


def submit(llm: LLM, count: int = len(PROMPTS)) -> list[OutputState]:
    return [llm.engine.add_request(f"r{i}", PROMPTS[i], PARAMS[i]) for i in range(count)]


def step(llm: LLM, count: int) -> None:
    for _ in range(count):
        llm.engine.step()


def run(llm: LLM) -> None:
    while llm.engine.has_unfinished:
        llm.engine.step()


def said(states: list[OutputState]) -> list[Any]:
    return [
        (state.request.output_token_ids, state.text, state.logprobs, state.prompt_logprobs, state.request.finish_reason)
        for state in states
    ]


@pytest.fixture(scope="module")
def expected(model: TinyModel) -> list[Any]:
    with open_llm(model, check=0) as llm:
        states = submit(llm)
        run(llm)
        return said(states)


def assert_same(one: list[Any], other: list[Any]) -> None:
    """Log-probabilities to rounding: chunks of other sizes give other sums."""
    for (ids, text, logprobs, prompt_logprobs, reason), theirs in zip(one, other, strict=True):
        assert (ids, text, reason) == (theirs[0], theirs[1], theirs[4])
        for ours, wanted in ((logprobs, theirs[2]), (prompt_logprobs or [], theirs[3] or [])):
            assert len(ours) == len(wanted)
            for table, other_table in zip(ours, wanted, strict=True):
                assert (table is None) == (other_table is None)
                for token in table or ():
                    assert table[token].logprob == pytest.approx(other_table[token].logprob, abs=1e-4)


BEFORE = {
    "cudagraph_capture_sizes": None,
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
}
CHANGES: list[dict[str, Any]] = [
    {"cudagraph_capture_sizes": [1, 4, 8, 32]},
    {"cudagraph_mode": "FULL"},
    {"cudagraph_mode": "PIECEWISE"},
    {"cudagraph_mode": "NONE"},
    {"max_num_seqs": 16},
    {"max_num_seqs": 3},
    {"max_num_batched_tokens": 96},
    {"max_num_seqs": 12, "max_num_batched_tokens": 48, "cudagraph_mode": "FULL_DECODE_ONLY"},
]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("change", CHANGES, ids=[" ".join(f"{k}={v}" for k, v in change.items()) for change in CHANGES])
def test_requests_go_on(model: TinyModel, expected: list[Any], change: dict[str, Any], max_in_flight: int) -> None:
    """In the middle of prompts and again in the middle of decoding, and back."""
    with open_llm(model, max_in_flight=max_in_flight) as llm:
        states = submit(llm)
        step(llm, 2)
        assert any(state.num_tokens == 0 for state in states), "all prompts are done: the test sees less than it should"
        llm.reconfigure(**change)
        step(llm, 8)
        llm.reconfigure(**{name: BEFORE[name] for name in change})
        run(llm)
        assert_same(said(states), expected)
        llm.engine.scheduler.check_integrity()


def test_only_what_is_missing_is_recorded(model: TinyModel) -> None:
    with open_llm(model, cudagraph_capture_sizes=[1, 2, 4, 8, 16]) as llm:
        before = {(line.mode, line.num_tokens): line for line in llm.stats().recordings}
        assert len(before) == 4 + 5
        done = llm.reconfigure(cudagraph_capture_sizes=[2, 3, 8, 32])
        new = [(line.mode, line.num_tokens) for line in done.recorded]
        assert new == [("PIECEWISE", 32), ("PIECEWISE", 3), ("FULL", 3)]
        assert (done.kept, done.dropped, done.preempted) == (4, 5, 0)
        assert all(line.seconds > 0 and line.num_nodes > 0 for line in done.recorded)
        after = {(line.mode, line.num_tokens): line for line in llm.stats().recordings}
        assert {index: line for index, line in after.items() if index in before} == {
            index: before[index] for index in [("PIECEWISE", 8), ("PIECEWISE", 2), ("FULL", 8), ("FULL", 2)]
        }
        assert (llm.stats().capture_sizes, llm.stats().mixed_capture_sizes) == ((2, 3, 8), (2, 3, 8, 32))
        # the same again: nothing to do
        again = llm.reconfigure(cudagraph_capture_sizes=[2, 3, 8, 32])
        assert (again.recorded, again.kept, again.dropped) == ((), 7, 0)


def test_each_kind_of_batch_may_have_a_ladder_of_its_own(model: TinyModel) -> None:
    with open_llm(model, cudagraph_capture_sizes={"uniform": [2, 8], "mixed": [5, 32]}) as llm:
        assert (llm.stats().capture_sizes, llm.stats().mixed_capture_sizes) == ((2, 8), (5, 32))
        done = llm.reconfigure(cudagraph_capture_sizes={"mixed": [16, 32]})
        assert (done.capture_sizes, done.mixed_capture_sizes) == ((1, 2, 4, 8), (16, 32))


def test_live_sizes_are_what_steps_were_asked_for(model: TinyModel) -> None:
    """Six prompts of five tokens are one mixed batch of 30, then six rows decode as eight."""
    with open_llm(model, enable_prefix_caching=False) as llm:
        llm.generate([prompt[:5] for prompt in PROMPTS if len(prompt) >= 5][:6], greedy(5))
        assert llm.stats().live_sizes == (LiveCount(None, 30, 1), LiveCount(1, 6, 4))
        assert {step.key for step in llm.stats().steps} == {BatchKey(32, 8, None), BatchKey(8, 8, 1)}
        assert llm.stats().max_num_batched_tokens == 32


def test_auto_takes_the_sizes_that_came(model: TinyModel, expected: list[Any]) -> None:
    """Five and three rows, padded to eight and four before, then run exactly; requests go on, and say the same."""
    with open_llm(model) as llm:
        llm.generate(PROMPTS[:5], greedy(20))
        llm.generate(PROMPTS[:3], greedy(20))
        before = llm.stats()
        padding = sum(step.padded_tokens - step.live_tokens for step in before.steps)
        assert padding > 0
        states = submit(llm)
        step(llm, 4)
        done = llm.reconfigure(cudagraph_capture_sizes="auto")
        assert {3, 5, 8} <= set(done.capture_sizes)
        assert done.mixed_capture_sizes[-1] == 32
        assert len(done.capture_sizes) + len(done.mixed_capture_sizes) <= 4 + 7
        after = llm.stats()
        assert (after.capture_sizes, after.mixed_capture_sizes) == (done.capture_sizes, done.mixed_capture_sizes)
        new = {line.num_rows for line in done.recorded if line.mode == "FULL"}
        assert new == set(done.capture_sizes) - set(before.capture_sizes)
        run(llm)
        assert_same(said(states), expected)
        first = llm.stats().steps
        llm.generate(PROMPTS[:5], greedy(20))
        keys = {
            step.key.num_rows for step in llm.stats().steps if step not in first and step.key and step.mode == "FULL"
        }
        assert 5 in keys
        # what it stood for stays, whatever is changed later
        kept = llm.reconfigure(cudagraph_mode="FULL")
        assert (kept.capture_sizes, kept.mixed_capture_sizes) == (done.capture_sizes, done.mixed_capture_sizes)


def test_auto_with_other_limits_and_modes(model: TinyModel) -> None:
    with open_llm(model) as llm:
        llm.generate(PROMPTS[:5], greedy(20))
        done = llm.reconfigure(cudagraph_capture_sizes="auto", max_num_seqs=4)
        assert (done.capture_sizes[-1], done.mixed_capture_sizes[-1]) == (4, 32)
        done = llm.reconfigure(cudagraph_capture_sizes="auto", cudagraph_mode="PIECEWISE")
        assert done.capture_sizes == ()
        assert {5, 32} <= set(done.mixed_capture_sizes)
        done = llm.reconfigure(cudagraph_capture_sizes="auto", cudagraph_mode="FULL_DECODE_ONLY", max_num_seqs=8)
        assert done.mixed_capture_sizes == ()
        assert {5, 8} <= set(done.capture_sizes)


def test_auto_needs_steps(model: TinyModel) -> None:
    with open_llm(model) as llm:
        before = llm.stats().recordings
        with pytest.raises(ConfigError, match="no step was counted that a ladder could serve"):
            llm.reconfigure(cudagraph_capture_sizes="auto")
        llm.generate(PROMPTS[:2], greedy(3))
        with pytest.raises(ConfigError, match="mode NONE records no sizes to choose"):
            llm.reconfigure(cudagraph_capture_sizes="auto", cudagraph_mode="NONE")
        assert llm.stats().recordings == before


def test_another_number_of_rows_records_everything_and_keeps_the_kv(model: TinyModel) -> None:
    with open_llm(model) as llm:
        states = submit(llm, 4)
        step(llm, 6)
        done = llm.reconfigure(max_num_seqs=16)
        assert done.preempted == 0
        assert done.kept == 0
        assert len(done.recorded) == llm.stats().num_recordings
        with launches(llm) as launched:
            step(llm, 1)
        (first,) = launched
        assert len(first.plan.admissions) == 4
        assert all(row.num_tokens == 1 for row in first.plan.rows), "their KV was computed again"
        run(llm)
        assert all(state.request.num_preemptions == 0 for state in states)
        assert llm.stats().max_num_seqs == 16
        # and all 16 rows serve
        assert len({tuple(o.outputs[0].token_ids) for o in llm.generate(PROMPTS * 2, greedy(4))}) == len(PROMPTS)


def test_counts_go_on(model: TinyModel) -> None:
    with open_llm(model) as llm:
        llm.generate(PROMPTS[:3], greedy(5))
        before = sum(counts_of(llm).values())
        llm.reconfigure(max_num_seqs=4)
        assert sum(counts_of(llm).values()) == before
        llm.generate(PROMPTS[:3], greedy(5))
        assert sum(counts_of(llm).values()) == 2 * before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block_size": 32}, "block_size cannot be changed at run time: only cudagraph_capture_sizes"),
        ({"cudagraph_mode": "FAST"}, "FAST"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": 64}, "max_num_batched_tokens=32: must be at least max_num_seqs"),
        ({"cudagraph_capture_sizes": [64]}, r"sizes to record \[64\] lie above 32"),
    ],
)
def test_what_cannot_be(model: TinyModel, expected: list[Any], options: dict[str, Any], says: str) -> None:
    with open_llm(model) as llm:
        before = llm.stats()
        states = submit(llm)
        step(llm, 5)
        with pytest.raises(ConfigError, match=says):
            llm.reconfigure(**options)
        run(llm)
        assert_same(said(states), expected)
        assert llm.stats().recordings == before.recordings


@pytest.mark.parametrize("options", [{"cudagraph_capture_sizes": [3, 5, 32]}, {"max_num_seqs": 5}])
def test_a_recording_that_fails_leaves_everything_in_place(
    model: TinyModel, expected: list[Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third of the new recordings raises."""
    with open_llm(model) as llm:
        before = llm.stats()
        states = submit(llm)
        step(llm, 5)
        fail_at(monkeypatch, llm, 3)
        with pytest.raises(CaptureError, match="put in on purpose"):
            llm.reconfigure(**options)
        monkeypatch.undo()
        after = llm.stats()
        assert after.recordings == before.recordings
        assert (after.capture_sizes, after.max_num_seqs) == (before.capture_sizes, 8)
        run(llm)
        assert_same(said(states), expected)
        llm.reconfigure(**options)
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:2], greedy(5))] == [
            model.greedy(prompt, 5) for prompt in PROMPTS[:2]
        ]


def fail_at(monkeypatch: pytest.MonkeyPatch, llm: LLM, number: int) -> None:
    """The backend cannot begin its `number`-th recording from now on. Keys are run before they are recorded, as on
    CUDA, which advances the device's count of steps."""
    backend = type(llm.engine.runner.backend)
    monkeypatch.setattr(backend, "needs_warm_up", True)
    original, calls = backend.begin, []

    def begin(self: Any, statics: Any) -> None:
        calls.append(1)
        if len(calls) >= number:
            raise CaptureError("put in on purpose")
        original(self, statics)

    monkeypatch.setattr(backend, "begin", begin)


# -- recording between steps -------------------------------------------------------------------------------------------


def recorded(llm: LLM) -> set[tuple[str, int]]:
    return {(line.mode, line.num_tokens) for line in llm.stats().recordings}


def test_lazy_records_what_steps_ask_for(model: TinyModel, expected: list[Any]) -> None:
    with open_llm(model, capture="lazy", cudagraph_capture_sizes=[1, 2, 3, 4, 6, 8, 16, 32]) as llm:
        assert recorded(llm) == {("PIECEWISE", 32), ("PIECEWISE", 1), ("FULL", 8), ("FULL", 1)}
        assert llm.stats().num_pending == 14 - 4
        assert not llm.engine.idle(), "nothing was asked for"
        llm.generate(PROMPTS[:3], greedy(5))
        while llm.engine.idle():
            pass
        counts = counts_of(llm)
        assert counts["NONE", None, "not recorded"] > 0, "at first a step ran without a graph"
        assert ("FULL", 3) in recorded(llm)
        llm.generate(PROMPTS[:3], greedy(5))
        assert counts_of(llm)["FULL", 3, "exact"] > counts.get(("FULL", 3, "exact"), 0)
        states = submit(llm)
        run(llm)
        assert_same(said(states), expected)
        assert 0 < llm.stats().num_pending < 10


def test_background_records_all_when_idle(model: TinyModel, expected: list[Any]) -> None:
    with open_llm(model, capture="background", cudagraph_capture_sizes=[1, 2, 3, 4, 6, 8, 16, 32]) as llm:
        assert ("FULL", 6) not in recorded(llm)
        states = submit(llm)
        run(llm)
        assert_same(said(states), expected)
        while llm.engine.idle():
            pass
        assert llm.stats().num_pending == 0
        assert llm.stats().num_recordings == 6 + 8
        assert llm.engine.runner._available is None, "all is there: picking must not ask any more"


def test_under_load_only_a_share_of_the_time_goes_into_recording(
    model: TinyModel, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that the test moves: no second recording until twenty times the first one's time has gone by."""
    clock = [100.0]
    monkeypatch.setattr("ostinato.engine.engine.time.perf_counter", lambda: clock[0])
    with open_llm(model, capture="background", cudagraph_capture_sizes=[1, 2, 3, 4, 6, 8, 16, 32]) as llm:
        original = llm.engine.runner.record_next

        def record_next() -> Any:
            clock[0] += 0.5
            return original()

        monkeypatch.setattr(llm.engine.runner, "record_next", record_next)
        states = submit(llm)
        pending = llm.stats().num_pending
        step(llm, 3)
        assert llm.stats().num_pending == pending, "recorded while requests waited"
        while llm.engine.scheduler.num_waiting:
            step(llm, 1)
        step(llm, 3)
        assert llm.stats().num_pending == pending - 1
        clock[0] += 9.4
        step(llm, 1)
        assert llm.stats().num_pending == pending - 1
        clock[0] += 0.2
        step(llm, 1)
        assert llm.stats().num_pending == pending - 2
        run(llm)
        assert_same(said(states), expected)


def test_a_key_that_cannot_be_recorded_later_is_left_out(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open_llm(model, capture="lazy", cudagraph_capture_sizes=[1, 2, 3, 4, 8, 32]) as llm:
        fail_at(monkeypatch, llm, 1)
        llm.generate(PROMPTS[:3], greedy(4))
        while llm.engine.idle():
            pass
        monkeypatch.undo()
        assert "cannot be recorded and will run without a graph: put in on purpose" in caplog.text
        assert ("FULL", 3) not in recorded(llm)
        assert not llm.engine.idle()
        assert llm.generate(PROMPTS[0], greedy(4))[0].outputs[0].token_ids == model.greedy(PROMPTS[0], 4)
        index = (RuntimeMode.FULL, BatchKey(3, 3, 1))
        assert index not in llm.engine.runner.store


def test_recording_while_requests_run_touches_nobody(model: TinyModel) -> None:
    """State, KV and what is not yet handed out are the same before and after."""
    with open_llm(model, capture="background", cudagraph_capture_sizes=[1, 2, 3, 4, 6, 8, 16, 32], check=0) as llm:
        submit(llm)
        step(llm, 12)
        llm.engine.settle()
        runner = llm.engine.runner
        state = [tensor.clone() for name, tensor in runner.state.named()]
        sent = {name: runner.state[name].clone() for name in ("row_slot", "query_start")}
        pool = runner.storage.pool.clone()
        assert runner.record_next() is not None
        for name, values in sent.items():  # the next step sends its own
            runner.state[name].copy_(values)
        state[0][runner.state.layout.at("step_count")] = 0
        for (name, now), before in zip(runner.state.named(), state, strict=True):
            assert torch.equal(now, before), name
        assert torch.equal(runner.storage.pool[1:], pool[1:])
