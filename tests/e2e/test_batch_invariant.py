"""`batch_invariant=True`: a request's tokens and log-probabilities are the same, bit for bit, whatever runs beside it,
in every mode and however its prompt is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import LLM, ConfigError, RequestOutput, SamplingParams

from .conftest import TinyFactory
from .driving import MODES, greedy
from .models import prompts_of

PROMPTS = prompts_of((1, 40, 3, 17, 7, 33, 16, 24, 9, 31, 2, 20, 15, 18, 5, 11), 160, seed=70)
PARAMS = [
    SamplingParams(temperature=0.9, top_p=0.9, seed=index, max_tokens=5, ignore_eos=True, logprobs=2)
    if index % 4 == 1
    else greedy(5, logprobs=2, prompt_logprobs=1 if index % 4 == 2 else None)
    for index in range(len(PROMPTS))
]
Bits = list[tuple[Any, ...]]


def open_llm(path: str, **options: Any) -> LLM:
    settings = {
        "device": "cpu",
        "max_model_len": 64,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 80,
        "batch_invariant": True,
        **options,
    }
    return LLM(path, **settings)


def bits_of(outputs: list[RequestOutput]) -> Bits:
    """Tokens and every log-probability; repr of a float is exact."""

    def table(rows: Any) -> str:
        return repr(
            [row and [(token, entry.logprob, entry.rank) for token, entry in row.items()] for row in rows or ()]
        )

    return [
        (output.outputs[0].token_ids, table(output.outputs[0].logprobs), table(output.prompt_logprobs))
        for output in outputs
    ]


def run(path: str, **options: Any) -> Bits:
    with open_llm(path, **options) as llm:
        return bits_of(llm.generate(PROMPTS, PARAMS))


@pytest.fixture(scope="module", params=["Llama", "Qwen3"])
def alone(request: pytest.FixtureRequest, tiny_model: TinyFactory) -> tuple[str, Bits]:
    """A model, and what it gives one request at a time without graphs, each prompt in one step."""
    path = str(tiny_model(request.param).path)
    return path, run(path, max_num_seqs=1, cudagraph_mode="NONE", enable_prefix_caching=False)


@pytest.mark.parametrize("mode", MODES)
def test_batches_in_every_mode(alone: tuple[str, Bits], mode: str) -> None:
    """3, 8 and 16 at once, in steps of 7, 24 and 64 tokens, which cut prompts at odd places beside decoding rows.
    Qwen3, whose heads are normed too, in the first of these."""
    path, expected = alone
    sizes = ((3, 7), (8, 24), (16, 64))
    for max_num_seqs, max_num_batched_tokens in sizes if "llama" in path else sizes[:1]:
        found = run(
            path,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            cudagraph_mode=mode,
            check=1,
        )
        assert found == expected, max_num_seqs


def test_any_place_in_the_batch(alone: tuple[str, Bits]) -> None:
    path, expected = alone
    with open_llm(path) as llm:
        for order in (range(15, -1, -1), [*range(5, 16), *range(5)]):
            found = bits_of(llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order]))
            assert found == [expected[i] for i in order]


def test_prefix_hits(alone: tuple[str, Bits]) -> None:
    """The second time the prompts' full blocks come from the cache, so that only their ends are computed."""
    path, expected = alone
    with open_llm(path) as llm:
        for _ in range(2):
            assert bits_of(llm.generate(PROMPTS, PARAMS)) == expected
        assert llm.engine.scheduler.kv.prefix_hit_tokens > 0


def test_preemption(alone: tuple[str, Bits]) -> None:
    """Six requests of one block each grow into a second, and there are seven: some lose theirs and are computed again,
    prompt and outputs in one go."""
    path, _ = alone
    prompts, params = prompts_of((15, 12, 14, 11, 13, 9), 160, seed=71), greedy(14, logprobs=2)
    with open_llm(path, max_num_seqs=1, enable_prefix_caching=False, cudagraph_mode="NONE") as llm:
        expected = bits_of(llm.generate(prompts, params))
    with open_llm(path, num_gpu_blocks_override=8, enable_prefix_caching=False, cudagraph_mode="NONE") as llm:
        assert bits_of(llm.generate(prompts, params)) == expected
        assert llm.stats().preemptions > 0


def test_the_default_is_not_invariant(tiny_model: TinyFactory) -> None:
    """What the option is for. This holds for MKL; another library may happen to be invariant at these sizes."""
    if not torch.backends.mkl.is_available():
        pytest.skip("the default path's products are not MKL's here")
    path = str(tiny_model("Llama").path)
    small = run(path, max_num_seqs=1, cudagraph_mode="NONE", batch_invariant=False)
    assert run(path, cudagraph_mode="NONE", batch_invariant=False) != small


def test_compile_is_refused(tiny_model: TinyFactory) -> None:
    with pytest.raises(ConfigError, match="batch_invariant=True: must be False with compile"):
        open_llm(str(tiny_model("Llama").path), compile=True)
