"""The mode is only where the step is cut: the tokens are the same in all of them, at every batch size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ostinato import LLM, SamplingParams

from .conftest import TinyFactory
from .driving import MODES, counts_of, greedy, modes_of
from .models import prompts_of
from .texts import GROUPS, TEXTS

BATCHES = (1, 3, 8, 13)
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 18, 20, 24, 31, 32, 33, 40, 47, 48, 50)

RUNTIME_MODES = {
    "NONE": {"NONE"},
    "PIECEWISE": {"PIECEWISE"},
    "FULL": {"FULL"},
    "FULL_DECODE_ONLY": {"FULL", "NONE"},
    "FULL_AND_PIECEWISE": {"FULL", "PIECEWISE"},
}


@pytest.mark.parametrize("max_num_seqs", BATCHES)
@pytest.mark.parametrize("mode", MODES)
def test_same_greedy_tokens(tiny_model: TinyFactory, mode: str, max_num_seqs: int) -> None:
    """20 prompts of different lengths and budgets, against the logits of transformers."""
    model = tiny_model("Llama", num_hidden_layers=3)
    prompts = prompts_of(LENGTHS, 160, seed=10)
    params = [greedy(6 + index % 7) for index in range(len(prompts))]
    with LLM(
        str(model.path),
        max_model_len=96,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=100,
        cudagraph_mode=mode,
        check=1,
    ) as llm:
        outputs = llm.generate(prompts, params)
        assert modes_of(llm) <= RUNTIME_MODES[mode]
        counted = counts_of(llm)
        stats = llm.stats()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6 + index % 7 for index in range(20)]
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        predicted = model.logits([*prompt, *tokens]).argmax(-1)[len(prompt) - 1 : -1]
        assert tokens == predicted.tolist()
    if mode in ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        assert stats.capture_sizes[-1] == max_num_seqs
        assert any(("FULL", max_num_seqs, reason) in counted for reason in ("exact", "padded"))
    assert not any("more rows" in reason or "more tokens" in reason for _, _, reason in counted)


# -- SmolLM2 -----------------------------------------------------------------------------------------------------------

CONTINUED = (
    ", the city of Nova Haven was a thriving metropolis, with towering skyscrapers and bustling streets."
    " But as the years went by, the city began to lose"
)


def smollm2(mode: str, max_num_seqs: int = 13, check: int = 0) -> LLM:
    return LLM(
        "smollm2",
        device="cpu",
        max_model_len=128,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        cudagraph_capture_sizes=[1, 3, 8, 13, 24, 64],
        cudagraph_mode=mode,
        check=check,
    )


def in_groups(llm: LLM, texts: Sequence[str], size: int, num_tokens: int) -> list[list[int]]:
    found: list[list[int]] = []
    for begin in range(0, len(texts), size):
        outputs = llm.generate(list(texts[begin : begin + size]), greedy(num_tokens))
        found += [output.outputs[0].token_ids for output in outputs]
    return found


@pytest.fixture(scope="module")
def smollm2_tokens() -> list[list[int]]:
    """Eager, all twenty at once."""
    with smollm2("NONE", max_num_seqs=20) as llm:
        return in_groups(llm, TEXTS, 20, 8)


@pytest.mark.smollm2
@pytest.mark.parametrize("mode", MODES)
def test_smollm2_same_tokens_in_batches(mode: str, smollm2_tokens: list[list[int]]) -> None:
    """Twenty texts, 8 tokens each, 1, 3, 8 and 13 at a time, under check: no near-tie among these falls differently."""
    with smollm2(mode, check=1) as llm:
        for size in GROUPS:
            assert in_groups(llm, TEXTS, size, 8) == smollm2_tokens, f"{size} at a time"
        assert (llm.stats().num_checked > 0) == (mode != "NONE")


@pytest.mark.smollm2
def test_smollm2_facts() -> None:
    """The known answers of this checkpoint, tokens and text."""
    with smollm2("FULL_AND_PIECEWISE", max_num_seqs=2) as llm:
        (chat,) = llm.chat(
            [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
            SamplingParams(temperature=0.0, max_tokens=20),
        )
        (story,) = llm.generate("Once upon a time", greedy(32))
    assert chat.outputs[0].token_ids == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert chat.outputs[0].text == "The capital of France is Paris."
    assert chat.outputs[0].finish_reason == "stop"
    assert CONTINUED.startswith(story.outputs[0].text) or story.outputs[0].text.startswith(CONTINUED)
    assert len(story.outputs[0].text) > 100
