"""The trials of other engines' users, on the tape backend: those about static state, padding, ladders and mixing.

Common setting: blocks of 16, context 256, 8 requests, ladder [1, 2, 4, 8], 64 blocks, greedy, no stop at eos.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ostinato import LLM
from ostinato.graphs.capture import record_all
from ostinato.graphs.dispatch import Reason
from ostinato.graphs.mode import RuntimeMode
from ostinato.graphs.recorder import Recorder
from ostinato.runner.inputs import StepBuffers
from ostinato.runner.runner import CUTS, Runner

from .conftest import TinyFactory
from .driving import ALWAYS, MODES, SeenStep, counts_of, drive, greedy
from .models import TinyModel, prompts_of

LADDER = [1, 2, 4, 8]
NAN = float("nan")
OUT_OF_RANGE = 0x3FFFFFFF


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Llama", max_position_embeddings=2048)


def open_llm(model: TinyModel, mode: str = "FULL_AND_PIECEWISE", **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 64,
        "enable_prefix_caching": False,
        "cudagraph_mode": mode,
        **options,
    }
    return LLM(str(model.path), **settings)


def assert_tails_are_pads(runner: Runner, step: SeenStep) -> None:
    """Every entry of every static input outside the live part of the step, and the whole scratch row."""
    state, buffers, plan = runner.state, runner.buffers, step.plan
    num_live = {name: plan.num_rows for name in ("seq_lens", "logit_index", "sampled")}
    num_live |= {name: plan.num_tokens for name in ("token_ids", "positions", "slot_mapping")}
    assert num_live.keys() == StepBuffers.pads.keys()
    for name, pad in StepBuffers.pads.items():
        tail = getattr(buffers, name)[num_live[name] :]
        assert torch.equal(tail, torch.full_like(tail, pad)), f"{name} after step {plan.step_id}"
    seen = set()
    for name, field in state.layout.fields.items():
        values = state[name]
        if field.per == "slot":
            seen.add(name)
            rest = values[state.layout.scratch]
            assert torch.equal(rest, torch.full_like(rest, field.pad)), f"{name} of the scratch row"
    assert {"block_table", "tokens", "num_tokens", "num_computed", "temperature", "flags"} <= seen
    scratch_rows = state["row_slot"][plan.num_rows :]
    assert torch.equal(scratch_rows, torch.full_like(scratch_rows, state.layout.scratch))
    ends = state["query_start"][plan.num_rows :]
    assert torch.equal(ends, torch.full_like(ends, plan.num_tokens))


def poison(llm: LLM) -> None:
    """NaN in every block that nobody can read, out-of-range ids in every derived input."""
    runner = llm.engine.runner
    runner.storage.fill_blocks([0, *llm.engine.scheduler.kv.empty_blocks()], NAN)
    for name in StepBuffers.pads:
        getattr(runner.buffers, name).fill_(OUT_OF_RANGE)
    for tensor in (runner.buffers.work.qkv, runner.buffers.work.attention_out, runner.buffers.work.stream):
        tensor.fill_(NAN)


# -- half-updated static state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_grow_then_shrink(model: TinyModel, mode: str) -> None:
    """8 requests of 120 tokens, then 5 of 3 and 40 more, tails poisoned between: Twin and tails at every step."""
    with open_llm(model, mode, cudagraph_capture_sizes=[*LADDER, 128], check=ALWAYS) as llm:
        runner = llm.engine.runner

        def after(step: SeenStep) -> None:
            assert_tails_are_pads(runner, step)

        large = prompts_of((80,) * 8, 160, seed=40)
        grown = drive(llm, large, greedy(40), name="large", after_step=after)
        poison(llm)
        small = prompts_of((3,) * 5, 160, seed=41)
        shrunk = drive(llm, small, greedy(40), name="small", after_step=after)
        stats = llm.stats()
    assert grown.tokens[0] == model.greedy(large[0], 40)
    for prompt, tokens in zip(small, shrunk.tokens, strict=True):
        assert tokens == model.greedy(prompt, 40)
    graph_steps = sum(row.count for row in stats.steps if row.mode != "NONE")
    assert stats.num_checked == graph_steps
    assert (graph_steps > 70) == (mode != "NONE")


def expected_counts(mode: str) -> dict[tuple[str, int | None, str], int]:
    """1 to 16 rows and back over the ladder [1, 2, 4, 8]: each count of rows comes twice."""
    if mode == "NONE":
        return {("NONE", None, Reason.GRAPHS_OFF.value): 32}
    whole = "PIECEWISE" if mode == "PIECEWISE" else "FULL"
    above = Reason.TOO_MANY_TOKENS if mode == "PIECEWISE" else Reason.TOO_MANY_ROWS
    exact = {(whole, size, Reason.EXACT.value): 2 for size in LADDER}
    padded = {(whole, 4, Reason.PADDED.value): 2, (whole, 8, Reason.PADDED.value): 6}
    return exact | padded | {("NONE", None, above.value): 16}


@pytest.mark.parametrize("mode", MODES)
def test_every_count(model: TinyModel, mode: str) -> None:
    """Prompts of one token arrive one a step and end one a step; the limit is twice the ladder's end."""
    prompts = prompts_of((1,) * 16, 160, seed=42)
    params = [greedy(34 - 2 * arrival) for arrival in range(1, 17)]
    with open_llm(model, mode, max_num_seqs=16, cudagraph_capture_sizes=LADDER, check=2) as llm:
        seen = drive(llm, prompts, params, arrivals=range(16))
        assert counts_of(llm) == expected_counts(mode)
    assert [step.plan.num_rows for step in seen.steps] == [*range(1, 17), *range(16, 0, -1)]
    assert all(bool(step.logits.isfinite().all()) for step in seen.steps)
    for prompt, one, tokens in zip(prompts, params, seen.tokens, strict=True):
        assert tokens == model.logits([*prompt, *tokens]).argmax(-1)[:-1].tolist()
        assert len(tokens) == one.max_tokens


# -- padded rows and real KV -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_nan_pool(model: TinyModel, mode: str) -> None:
    """The pool and all inputs are NaN before the start and what is free again after each finish; lengths 1 to 33."""
    prompts = prompts_of(range(1, 34), 160, seed=43)
    with open_llm(model, mode, max_num_seqs=3, cudagraph_capture_sizes=[1, 2, 3, 64]) as llm:
        llm.engine.runner.storage.pool.fill_(NAN)
        poison(llm)
        num_running = 0

        def after(step: SeenStep) -> None:
            nonlocal num_running
            assert bool(step.logits.isfinite().all()), step.plan
            if llm.engine.scheduler.num_running != num_running:
                poison(llm)
            num_running = llm.engine.scheduler.num_running

        seen = drive(llm, prompts, [greedy(2 + index % 5) for index in range(33)], after_step=after)
    for prompt, tokens in zip(prompts, seen.tokens, strict=True):
        assert tokens == model.logits([*prompt, *tokens]).argmax(-1)[len(prompt) - 1 : -1].tolist()


def changed_cells(before: torch.Tensor, after: torch.Tensor) -> set[int]:
    """Slots of the pool [N, L, 2, B, G, D] whose bytes differ."""
    differs = (before.view(torch.int32) != after.view(torch.int32)).transpose(1, 3).flatten(2).any(-1)
    return set(differs.flatten().nonzero().flatten().tolist())


@pytest.mark.parametrize("mode", MODES)
def test_who_wrote_what(model: TinyModel, mode: str) -> None:
    """Recording again, a dummy step and padded steps: only live slots change, and the scratch block may.

    One request owns the first block that can be handed out; row 1 of 4 finishes first, which leaves 3 rows at key 4.
    """
    with open_llm(model, mode, cudagraph_capture_sizes=[*LADDER, 128]) as llm:
        runner, pool = llm.engine.runner, llm.engine.runner.storage.pool
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(0)))
        state = runner.state.arena.clone()

        before = pool.clone()
        runner.store.clear()
        runner.record()
        assert not changed_cells(before, pool), "recording wrote to the KV cache"
        runner.warm_up()
        assert changed_cells(before, pool) <= set(range(16)), "a step of padding wrote to the KV cache"
        runner.reset_step_count()
        assert torch.equal(runner.state.arena, state), "recording and a step of padding left traces in the state"

        owners: list[bool] = []
        snapshot = pool.clone()

        def after(step: SeenStep) -> None:
            nonlocal snapshot
            live = runner.buffers.slot_mapping[: step.plan.num_tokens].tolist()
            assert len(set(live)) == step.plan.num_tokens
            assert min(live) >= 16, "a live token went to the scratch block"
            assert {slot for slot in changed_cells(snapshot, pool) if slot >= 16} == set(live)
            table = runner.state["block_table"]
            owners.append(any(1 in table[row.slot].tolist() for row in step.plan.rows))
            snapshot = pool.clone()

        params = [greedy(20), greedy(5), greedy(20), greedy(20)]
        seen = drive(llm, prompts_of((15, 30, 1, 20), 160, seed=44), params, after_step=after)
    assert any(owners)
    if mode not in ("NONE",):
        assert any(step.plan.num_rows == 3 and step.decision.key.num_tokens == 4 for step in seen.steps)


def test_recording_again_gives_the_same(model: TinyModel) -> None:
    """Between two steps of running requests, on purpose: the tokens are as if nothing had happened."""
    prompts = prompts_of((15, 30, 4), 160, seed=45)
    with open_llm(model) as llm:
        runner = llm.engine.runner

        def after(step: SeenStep) -> None:
            if step.plan.step_id == 9:
                runner.store.clear()
                record_all(
                    runner.store,
                    Recorder(runner.backend, runner.statics),
                    runner.dispatcher.keys(),
                    step=runner._step,
                    cuts=CUTS,
                )

        seen = drive(llm, prompts, greedy(20), after_step=after)
        again = drive(llm, prompts, greedy(20), name="again")
    for prompt, tokens, twice in zip(prompts, seen.tokens, again.tokens, strict=True):
        assert tokens == twice == model.greedy(prompt, 20)


# -- a silent slow path ------------------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_over_the_ceiling(model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    """A ladder that ends at 8 with a limit of 64: one warning that names both, counters, and recovery."""
    caplog.set_level(logging.INFO, logger="ostinato")
    with open_llm(model, max_num_seqs=64, num_gpu_blocks_override=200, cudagraph_capture_sizes=LADDER) as llm:
        params = [greedy(40)] * 6 + [greedy(8)] * 6 + [greedy(6)] * 6
        arrivals = [0] * 6 + [5] * 6 + [20] * 6
        seen = drive(llm, prompts_of((1,) * 18, 160, seed=46), params, arrivals=arrivals)
        counted = counts_of(llm)
    (warning,) = warnings_of(caplog)
    assert "8" in warning
    assert "64" in warning
    assert "cudagraph_capture_sizes" in warning
    for step in seen.steps:
        rows = step.plan.num_rows
        assert (step.decision.mode is RuntimeMode.NONE) == (rows > 8), f"{rows} rows: {step.decision}"
    assert counted["NONE", None, Reason.TOO_MANY_ROWS.value] == 14
    assert seen.steps[-1].decision.mode is RuntimeMode.FULL, "it did not recover"


@pytest.mark.parametrize("limit", [1, 3, 8, 13, 64])
def test_the_default_has_no_ceiling(model: TinyModel, limit: int, caplog: pytest.LogCaptureFixture) -> None:
    """Without a list of sizes the largest batch that the scheduler can make is recorded, and nothing is warned of."""
    caplog.set_level(logging.INFO, logger="ostinato")
    with open_llm(model, max_num_seqs=limit, num_gpu_blocks_override=200) as llm:
        stats = llm.stats()
        assert stats.capture_sizes[-1] == limit
        assert stats.mixed_capture_sizes[-1] == 128
        drive(llm, prompts_of((1,) * limit, 160), greedy(3))
        assert not [reason for mode, _, reason in counts_of(llm) if mode == "NONE"]
    assert not warnings_of(caplog)
    assert any("worst padding" in record.getMessage() for record in caplog.records)


# -- mixed steps -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_context(model: TinyModel) -> Iterator[tuple[LLM, LLM]]:
    """An engine with chunks of 128 beside 3 decoding rows, and Solo: eager, one request at a time, in one piece."""
    options: dict[str, Any] = {"max_model_len": 1152, "num_gpu_blocks_override": 90}
    with (
        open_llm(model, max_num_seqs=4, max_num_batched_tokens=131, check=1, **options) as mixed,
        open_llm(model, "NONE", max_num_seqs=1, max_num_batched_tokens=1152, **options) as solo,
    ):
        yield mixed, solo


def test_mixed_steps_equal_solo(long_context: tuple[LLM, LLM]) -> None:
    """A prompt of 1000 in chunks of 128 beside 3 rows that decode: log-probabilities of every token as alone."""
    llm, solo = long_context
    prompts = prompts_of((7, 20, 33, 1000), 160, seed=47)
    params = [greedy(30, logprobs=3)] * 4
    num_recordings = llm.stats().num_recordings
    seen = drive(llm, prompts, params, arrivals=(0, 0, 0, 4))
    mixed = [step for step in seen.steps if step.plan.query_len is None]
    chunks = [row.num_tokens for step in mixed for row in step.plan.rows if row.request_id == "r-3"]
    assert chunks == [128] * 7 + [104]
    assert all(step.decision.mode is not RuntimeMode.FULL for step in mixed), "a decode graph ran a mixed step"
    assert any(step.decision.mode is RuntimeMode.FULL for step in seen.steps)
    assert llm.stats().num_recordings == num_recordings
    assert llm.engine.runner.store.sealed
    for prompt, one, output in zip(prompts, params, seen.outputs, strict=True):
        alone = solo.generate([prompt], one)[0].outputs[0]
        assert output.request.output_token_ids == alone.token_ids
        assert alone.logprobs is not None
        for ours, theirs in zip(output.logprobs, alone.logprobs, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4) for token in ours)


def test_more_than_double_padding_goes_eager(model: TinyModel) -> None:
    """The next size above 9 tokens is 128: eager, and the counter says why."""
    with open_llm(model, cudagraph_capture_sizes=[*LADDER, 128]) as llm:
        drive(llm, prompts_of((9, 70), 160, seed=48), greedy(3), arrivals=(0, 2))
        counted = counts_of(llm)
    assert counted["NONE", None, Reason.TOO_MUCH_PADDING.value] == 1
    assert counted["PIECEWISE", 128, Reason.MIXED_PIECEWISE.value] == 1
