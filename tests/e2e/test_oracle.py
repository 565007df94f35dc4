"""Our float32 logits against transformers', at every position that a step computes, in every mode, under check."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import LLM

from .conftest import TinyFactory
from .driving import MODES, Drive, drive, greedy
from .models import LINEAR_ROPE, LLAMA3_ROPE, TinyModel, prompts_of

TOLERANCE = 1e-4
NUM_DECODED = 41  # the first comes out of the prefill, 40 out of decode steps

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "wide-heads": ("Llama", {"head_dim": 32, "num_hidden_layers": 3}),
    "one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "no-groups": ("Llama", {"num_key_value_heads": 4, "vocab_size": 129}),
    "sharded": ("Llama", {"max_shard_size": "60KB"}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "vocab_size": 300}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
}


def open_llm(model: TinyModel, mode: str, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 64,
        "cudagraph_mode": mode,
        "check": 2,
        **options,
    }
    return LLM(str(model.path), **settings)


def assert_agrees(model: TinyModel, seen: Drive) -> None:
    """Every live row of every step, and every greedy token."""
    expected = {output.request.request_id: model.logits(output.request.tokens) for output in seen.outputs}
    compared = 0
    for output, position, logits in seen.logits_by_request():
        reference = expected[output.request.request_id][position]
        worst = (logits - reference).abs().max().item()
        assert worst < TOLERANCE, f"{output.request.request_id} at position {position}: off by {worst}"
        compared += 1
    assert compared >= sum(output.num_tokens for output in seen.outputs)
    for output in seen.outputs:
        request = output.request
        start = request.num_prompt_tokens - 1
        predicted = expected[request.request_id].argmax(-1)[start:-1].tolist()
        assert request.output_token_ids == predicted
    assert any(len(set(tokens)) > 5 for tokens in seen.tokens), "the model repeats itself: the test sees nothing"


def assert_checked(llm: LLM, mode: str) -> None:
    stats = llm.stats()
    if mode == "NONE":
        assert stats.num_recordings == 0
        assert stats.num_checked == 0
    else:
        assert stats.num_recordings > 0
        assert stats.num_checked > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arch", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_plain(tiny_model: TinyFactory, arch: str, mode: str) -> None:
    model = tiny_model(arch)
    with open_llm(model, mode) as llm:
        assert_agrees(model, drive(llm, prompts_of((5, 17, 33), 160), greedy(NUM_DECODED)))
        assert_checked(llm, mode)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(tiny_model: TinyFactory, name: str) -> None:
    arch, overrides = VARIANTS[name]
    model = tiny_model(arch, **overrides)
    if name == "sharded":
        assert len(list(model.path.glob("*.safetensors"))) > 2
    with open_llm(model, "FULL_AND_PIECEWISE") as llm:
        assert_agrees(model, drive(llm, prompts_of((1, 16, 31), 128, seed=1), greedy(NUM_DECODED)))


@pytest.mark.parametrize("mode", MODES)
def test_chunked_prefill(tiny_model: TinyFactory, mode: str) -> None:
    """Prompts of up to 70 tokens in steps of at most 13, chunk borders within and on block borders."""
    model = tiny_model("Llama")
    with open_llm(model, mode, max_num_batched_tokens=13) as llm:
        seen = drive(llm, prompts_of((70, 32, 3), 160, seed=2), greedy(NUM_DECODED))
        assert_agrees(model, seen)
        assert_checked(llm, mode)
    assert max(step.plan.num_tokens for step in seen.steps) == 13
    assert any(not row.samples for step in seen.steps for row in step.plan.rows)


@pytest.mark.parametrize("mode", MODES)
def test_prefix_hit(tiny_model: TinyFactory, mode: str) -> None:
    """The same prompts again: full blocks come from the cache, and the last token of a full hit is computed again."""
    model = tiny_model("Llama")
    prompts = prompts_of((48, 37, 9), 160, seed=3)
    with open_llm(model, mode) as llm:
        first = drive(llm, prompts, greedy(NUM_DECODED), name="first")
        again = drive(llm, prompts, greedy(NUM_DECODED), name="again")
        assert_agrees(model, first)
        assert_agrees(model, again)
        assert_checked(llm, mode)
        assert llm.stats().prefix_hit_tokens == 64
    assert [output.request.num_cached_tokens for output in again.outputs] == [32, 32, 0]
    assert first.tokens == again.tokens


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cached", [True, False], ids=["prefix-cache", "no-cache"])
def test_preemption(tiny_model: TinyFactory, mode: str, cached: bool) -> None:
    """Three requests of 5 blocks each in a pool of 9: some are preempted and computed again."""
    model = tiny_model("Llama")
    with open_llm(model, mode, num_gpu_blocks_override=10, enable_prefix_caching=cached) as llm:
        seen = drive(llm, prompts_of((31, 33, 30), 160, seed=4), greedy(NUM_DECODED))
        assert_agrees(model, seen)
        assert_checked(llm, mode)
        stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.free_blocks == 9


@pytest.mark.parametrize("mode", MODES)
def test_more_than_100_tokens(tiny_model: TinyFactory, mode: str) -> None:
    """Errors that creep in with length: blocks appended again and again, rows that end at different times."""
    model = tiny_model("Llama")
    params = [greedy(150), greedy(101), greedy(128)]
    with open_llm(model, mode, max_model_len=256) as llm:
        seen = drive(llm, prompts_of((7, 40, 18), 160, seed=5), params, arrivals=(0, 3, 50))
        assert_agrees(model, seen)
        assert_checked(llm, mode)
    assert [len(tokens) for tokens in seen.tokens] == [150, 101, 128]


def test_ends_at_the_model_length(tiny_model: TinyFactory) -> None:
    """A request without max_tokens fills its row to the very last position."""
    model = tiny_model("Llama")
    with open_llm(model, "FULL_AND_PIECEWISE", max_model_len=64) as llm:
        seen = drive(llm, prompts_of((63, 40, 5), 160, seed=6), greedy(None))
        assert_agrees(model, seen)
    assert [len(output.request.tokens) for output in seen.outputs] == [64, 64, 64]
    assert {output.completion(0).finish_reason for output in seen.outputs} == {"length"}


def test_the_oracle_itself_is_deterministic(tiny_model: TinyFactory) -> None:
    """Teacher forcing over the whole sequence gives what growing it token by token gives."""
    model = tiny_model("Qwen3")
    prompt = prompts_of((9,), 160)[0]
    tokens = prompt + model.greedy(prompt, 12)
    assert torch.equal(model.logits(tokens).argmax(-1)[8:-1], torch.tensor(tokens[9:]))
