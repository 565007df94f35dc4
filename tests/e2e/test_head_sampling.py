"""A head that chooses tokens in the step: the tokens of logits and sampler, in every mode, under check.

On the CPU no head is in the table; the reference takes any number of rows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import LLM, RequestOutput, SamplingParams
from ostinato.errors import StaleGraphError
from ostinato.kernels import ops
from ostinato.models import decoder
from ostinato.models.decoder import Decoder

from .conftest import TinyFactory
from .driving import ALWAYS, MODES, greedy
from .models import prompts_of

V = 128
PROMPTS = prompts_of((3, 17, 9, 1, 30, 12, 5, 8), V, seed=73)


def sampled(**params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 9, "ignore_eos": True, "seed": 11, **params})


PARAMS = [
    greedy(8),
    sampled(temperature=1.0),
    sampled(temperature=0.8, top_p=0.8),
    greedy(7, logprobs=3),
    sampled(temperature=1.2, logprobs=0, prompt_logprobs=2),
    sampled(temperature=0.0, frequency_penalty=0.7, repetition_penalty=1.2),
    sampled(temperature=0.0, min_tokens=4, stop_token_ids=[5, 6, 7], ignore_eos=False),
    sampled(temperature=1.0, logit_bias={3: 4.0, 9: -3.0}),
]


def open_llm(path: str, mode: str, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "device": "cpu",
        "max_model_len": 64,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 24,
        "num_gpu_blocks_override": 40,
        "cudagraph_mode": mode,
        "check": ALWAYS,
        **options,
    }
    return LLM(path, **settings)


def tables(outputs: list[RequestOutput]) -> list[list[list[float]]]:
    """Log-probabilities of the outputs and of the prompts."""
    found = []
    for output in outputs:
        given = [*(output.outputs[0].logprobs or ()), *(output.prompt_logprobs or ())]
        found.append([[entry.logprob for entry in table.values()] for table in given if table])
    return found


def answers(path: str, mode: str) -> tuple[list[Any], list[list[list[float]]]]:
    with open_llm(path, mode) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        if mode != "NONE":
            assert llm.stats().num_checked > 0
    return [output.outputs[0].token_ids for output in outputs], tables(outputs)


@pytest.fixture
def in_head(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every head chooses; the list has the number of rows of each that did."""
    seen: list[int] = []

    def sample(x: torch.Tensor, *rest: Any) -> None:
        seen.append(x.shape[0])
        small_linear_sample(x, *rest)

    small_linear_sample = ops.small_linear_sample
    monkeypatch.setattr(Decoder, "samples_in_head", lambda *_: True)
    monkeypatch.setattr(decoder.ops, "small_linear_sample", sample)
    return seen


@pytest.mark.parametrize("arch", ["Llama", "Qwen3"])
def test_every_mode(tiny_model: TinyFactory, monkeypatch: pytest.MonkeyPatch, in_head: list[int], arch: str) -> None:
    path = str(tiny_model(arch, vocab_size=V).path)
    with monkeypatch.context() as apart:
        apart.setattr(Decoder, "samples_in_head", lambda *_: False)
        expected, expected_tables = answers(path, "NONE")
    assert not in_head
    for mode in MODES:
        tokens, found = answers(path, mode)
        assert tokens == expected, mode
        assert found == [[pytest.approx(row, abs=1e-4) for row in rows] for rows in expected_tables], mode
        assert in_head, mode
        in_head.clear()


def test_only_rows_that_need_logits_have_them(tiny_model: TinyFactory, in_head: list[int]) -> None:
    """A graph is recorded before any request: what a row needs is data of the step."""
    with open_llm(str(tiny_model("Llama", vocab_size=V).path), "FULL", check=0) as llm:
        engine = llm.engine
        logits = engine.runner.buffers.logits
        for params, stored in zip(PARAMS, (False, False, True, True, True, True, True, True), strict=True):
            logits.fill_(float("nan"))
            llm.generate([PROMPTS[0]], params)
            assert bool(logits[0].isnan().all()) is not stored, params
            assert stored or bool(logits.isnan().all())
    assert in_head


def test_check_notices_nan_in_rows_without_logits(
    tiny_model: TinyFactory, monkeypatch: pytest.MonkeyPatch, in_head: list[int]
) -> None:
    """Their logits are poison, which says nothing; the stream that the head takes does."""
    with open_llm(str(tiny_model("Llama", vocab_size=V).path), "FULL") as llm:
        llm.generate(PROMPTS[:2], greedy(3))
        llm.engine.runner.model.weights.norm[0] = float("nan")  # behind the stream: seen in logits alone
        with pytest.raises(StaleGraphError, match="logits are NaN"):
            llm.generate(PROMPTS[:1], greedy(3, logprobs=1))
    with open_llm(str(tiny_model("Llama", vocab_size=V).path), "FULL") as llm:
        llm.engine.runner.model.weights.layers[1].down[:, 0] = float("nan")
        with pytest.raises(StaleGraphError, match="residual stream is NaN"):
            llm.generate(PROMPTS[:1], greedy(3))
    assert in_head


def test_heads_of_the_table(tiny_model: TinyFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """By vocabulary, hidden size and rows, where products have kernels of their own at all; none as it stands."""
    with open_llm(str(tiny_model("Llama", vocab_size=V).path), "NONE") as llm:
        model = llm.engine.runner.model
        size = model.config.hidden_size
        monkeypatch.setattr(model, "_max_small_rows", 256)
        assert not any(model.samples_in_head(n) for n in range(1, 300))
        monkeypatch.setattr(decoder, "head_config", lambda *shape: shape if shape == (V, size, 6) else None)
        assert [n for n in range(1, 300) if model.samples_in_head(n)] == [6]
        monkeypatch.setattr(model, "_max_small_rows", 0)
        assert not model.samples_in_head(6)
