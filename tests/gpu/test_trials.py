"""The trial cards on CUDA, and those that only a GPU can hold. See docs/trials.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM

from ..e2e import cards
from ..e2e.driving import MODES, greedy
from ..e2e.models import TinyModel, prompts_of
from .conftest import ModelFactory

TIE = 5e-3
"""In logits: what another order of sums may move in float32."""
CLOCK_HZ = 2_000_000_000
"""About an H200's, for waits on the device that need not be exact."""


@pytest.fixture
def model(small_model: ModelFactory) -> TinyModel:
    return small_model(vocab_size=cards.V, std=0.2)


@pytest.fixture
def on(device: torch.device) -> dict[str, Any]:
    return {"device": str(device), "dtype": "float32"}


@pytest.mark.parametrize("mode", MODES)
def test_grow_then_shrink(model: TinyModel, on: dict[str, Any], mode: str) -> None:
    cards.grow_then_shrink(model, mode, tie=TIE, **on)


@pytest.mark.parametrize("mode", MODES)
def test_every_count(model: TinyModel, on: dict[str, Any], mode: str) -> None:
    cards.every_count(model, mode, tie=TIE, **on)


@pytest.mark.parametrize("mode", MODES)
def test_nan_pool(model: TinyModel, on: dict[str, Any], mode: str) -> None:
    cards.nan_pool(model, mode, tie=TIE, **on)


@pytest.mark.parametrize("mode", MODES)
def test_who_wrote_what(model: TinyModel, on: dict[str, Any], mode: str) -> None:
    cards.who_wrote_what(model, mode, **on)


def test_over_the_ceiling(model: TinyModel, on: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    cards.over_the_ceiling(model, caplog, **on)


@pytest.fixture
def mixed_and_solo(model: TinyModel, on: dict[str, Any]) -> Iterator[tuple[LLM, LLM]]:
    long: dict[str, Any] = {"max_model_len": 1152, "num_gpu_blocks_override": 90, **on}
    with (
        cards.open_llm(model, max_num_seqs=4, max_num_batched_tokens=131, check=1, **long) as mixed,
        cards.open_llm(model, "NONE", max_num_seqs=1, max_num_batched_tokens=1152, **long) as solo,
    ):
        yield mixed, solo


def test_mixed_steps_equal_solo(mixed_and_solo: tuple[LLM, LLM]) -> None:
    cards.mixed_steps_equal_solo(*mixed_and_solo, tolerance=TIE)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_weights_in_place_then_rebound(
    small_model: ModelFactory, on: dict[str, Any], mode: str, tmp_path: Path
) -> None:
    biased = small_model(vocab_size=cards.V, std=0.2, attention_bias=True)
    cards.weights_in_place_then_rebound(biased, mode, tmp_path, **on)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("corruption", cards.CORRUPTIONS)
def test_a_corrupted_word_of_the_state_is_named(
    model: TinyModel, on: dict[str, Any], mode: str, corruption: str
) -> None:
    cards.corrupted_word(model, mode, *cards.CORRUPTIONS[corruption], **on)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_overlap_for_ten_thousand_steps(model: TinyModel, on: dict[str, Any]) -> None:
    """The device waits some 5 ms before each copy, so the host runs ahead as far as it may. `batch_invariant`, because
    batches differ with the steps in flight, and tokens must not."""
    steps = cards.overlap_equals_one_step_in_flight(
        model, "FULL_AND_PIECEWISE", 1450, lambda: torch.cuda._sleep(CLOCK_HZ // 200), batch_invariant=True, **on
    )
    assert steps > 10_000


# -- only on a GPU -----------------------------------------------------------------------------------------------------

LENGTHS = (16, 1000, 4096, 16384, 32700)


def long_llm(model: TinyModel, device: torch.device, mode: str, max_model_len: int = 32768, **options: Any) -> LLM:
    return LLM(
        str(model.path),
        device=str(device),
        dtype="float32",
        max_model_len=max_model_len,
        max_num_seqs=4,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=1 + 4 * (max_model_len // 16),
        enable_prefix_caching=False,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=[1, 4, 2048],
        **options,
    )


def said_by(llm: LLM, prompts: list[list[int]], count: int = 40) -> list[list[float]]:
    """The log-probabilities of what each request said."""
    engine = llm.engine
    states = [engine.add_request(f"n{i}", prompt, greedy(count, logprobs=0)) for i, prompt in enumerate(prompts)]
    while engine.has_unfinished:
        engine.step()
    return [
        [table[token].logprob for table, token in zip(state.logprobs, state.request.output_token_ids, strict=True)]
        for state in states
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("batch", [1, 4])
def test_length_sweep(small_model: ModelFactory, device: torch.device, batch: int) -> None:
    """Short and long contexts, ragged where there are four: decode graphs against the same steps without graphs, and
    against the ragged attention kernel, which splits nothing. What they take: `benchmarks/length_sweep.py`."""
    model = small_model(max_position_embeddings=32768)
    for length in LENGTHS:
        lengths = [length] if batch == 1 else [1, 17, length - 1, length]
        prompts = prompts_of(lengths, 512, seed=length)
        runs = {}
        for name, options in (
            ("graph", {"mode": "FULL_AND_PIECEWISE"}),
            ("eager", {"mode": "NONE"}),
            ("reference", {"mode": "NONE", "batch_invariant": True}),
        ):
            with long_llm(model, device, **options) as llm:  # type: ignore[arg-type]
                runs[name] = said_by(llm, prompts)
        for other in ("eager", "reference"):
            for ours, theirs in zip(runs["graph"], runs[other], strict=True):
                assert ours[:8] == pytest.approx(theirs[:8], abs=TIE), (other, lengths)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recordings_do_not_grow_with_the_context(small_model: ModelFactory, device: torch.device, dtype: str) -> None:
    model = small_model(max_position_embeddings=32768)
    cards.recordings_do_not_grow_with_the_context(model, (1024, 32768), device=str(device), dtype=dtype)
