"""The trials of other engines' users, on the tape backend: those about static state, padding, ladders and mixing.

Common setting: blocks of 16, context 256, 8 requests, ladder [1, 2, 4, 8], 64 blocks, greedy, no stop at eos.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from ostinato import LLM
from ostinato.graphs.capture import record_all
from ostinato.graphs.dispatch import Reason
from ostinato.graphs.recorder import Recorder
from ostinato.runner.runner import CUTS

from . import cards
from .cards import LADDER, open_llm, warnings_of
from .conftest import TinyFactory
from .driving import MODES, SeenStep, counts_of, drive, greedy
from .models import TinyModel, prompts_of


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Llama", max_position_embeddings=2048)


# -- long contexts -----------------------------------------------------------------------------------------------------


def test_recordings_do_not_grow_with_the_context(model: TinyModel) -> None:
    cards.recordings_do_not_grow_with_the_context(model, (256, 2048))


# -- half-updated static state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_grow_then_shrink(model: TinyModel, mode: str) -> None:
    cards.grow_then_shrink(model, mode)


@pytest.mark.parametrize("mode", MODES)
def test_every_count(model: TinyModel, mode: str) -> None:
    cards.every_count(model, mode)


# -- padded rows and real KV -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_nan_pool(model: TinyModel, mode: str) -> None:
    cards.nan_pool(model, mode)


@pytest.mark.parametrize("mode", MODES)
def test_who_wrote_what(model: TinyModel, mode: str) -> None:
    cards.who_wrote_what(model, mode)


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


def test_over_the_ceiling(model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    cards.over_the_ceiling(model, caplog)


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
    cards.mixed_steps_equal_solo(*long_context)


def test_more_than_double_padding_goes_eager(model: TinyModel) -> None:
    """The next size above 9 tokens is 128: eager, and the counter says why."""
    with open_llm(model, cudagraph_capture_sizes=[*LADDER, 128]) as llm:
        drive(llm, prompts_of((9, 70), 160, seed=48), greedy(3), arrivals=(0, 2))
        counted = counts_of(llm)
    assert counted["NONE", None, Reason.TOO_MUCH_PADDING.value] == 1
    assert counted["PIECEWISE", 128, Reason.MIXED_PIECEWISE.value] == 1
