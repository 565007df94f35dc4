"""Sleep and other weights between two steps of running requests, on the tape backend."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM, StaleGraphError, UnavailableError
from ostinato.errors import ConfigError, WeightError
from ostinato.weights.checkpoint import open_checkpoint

from .conftest import TinyFactory
from .driving import ALWAYS, greedy
from .models import TinyModel, prompts_of

PROMPTS = prompts_of((5, 18, 9, 33, 2, 40, 7, 16), 160, seed=60)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Llama", attention_bias=True)


@pytest.fixture(scope="module")
def other(tiny_model: TinyFactory) -> TinyModel:
    """The same shape with other weights."""
    return tiny_model("Llama", attention_bias=True, seed=1)


def open_llm(model: TinyModel, mode: str = "FULL_AND_PIECEWISE", **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 64,
        "cudagraph_mode": mode,
        "check": ALWAYS,
        **options,
    }
    return LLM(str(model.path), **settings)


def submit(llm: LLM) -> list[Any]:
    return [llm.engine.add_request(f"r{i}", prompt, greedy(NUM_TOKENS)) for i, prompt in enumerate(PROMPTS)]


def run(llm: LLM) -> None:
    while llm.engine.has_unfinished:
        llm.engine.step()


def tokens(states: list[Any]) -> list[list[int]]:
    return [state.request.output_token_ids for state in states]


@pytest.fixture(scope="module")
def expected(model: TinyModel) -> list[list[int]]:
    with open_llm(model, check=0) as llm:
        states = submit(llm)
        run(llm)
        return tokens(states)


# -- sleep -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_sleeping_changes_nothing(
    model: TinyModel, expected: list[list[int]], level: int, mode: str, max_in_flight: int
) -> None:
    """At a random step, with only the weights awake for a moment, and woken once more than needed."""
    chance = random.Random(f"{level} {mode} {max_in_flight}")
    with open_llm(model, mode, max_in_flight=max_in_flight) as llm:
        states = submit(llm)
        for _ in range(chance.randint(1, NUM_TOKENS)):
            llm.engine.step()
        num_recordings = llm.stats().num_recordings
        llm.sleep(level)
        assert llm.is_sleeping()
        assert llm.stats().asleep == ("kv_cache", "weights")
        weights = dict(llm.engine.runner.model.weights.named())
        assert all(tensor.eq(0).all() for tensor in weights.values()), "the weights' memory did not go"
        assert llm.engine.runner.storage.pool.eq(0).all(), "the KV cache's memory did not go"
        while llm.engine.can_step:  # what was collected before sleeping is still handed out
            llm.engine.step()
        with pytest.raises(UnavailableError, match="kv_cache"):
            llm.engine.step()
        llm.wake_up(["weights"])
        with pytest.raises(UnavailableError, match=r"no kv_cache: the engine sleeps: wake_up\(\) first"):
            llm.engine.step()
        with pytest.raises(UnavailableError, match="kv_cache"):
            llm.generate([1, 2, 3])
        llm.wake_up()
        llm.wake_up()
        assert not llm.is_sleeping()
        run(llm)
        assert tokens(states) == expected
        assert llm.stats().num_recordings == num_recordings
        llm.engine.scheduler.check_integrity()


def test_asleep_and_awake_without_requests(model: TinyModel, expected: list[list[int]]) -> None:
    with open_llm(model) as llm:
        for level in (1, 2, 1):
            llm.sleep(level)
            llm.sleep(2)  # what is away stays as it is kept
            llm.wake_up(["kv_cache"])
            llm.wake_up(["weights"])
            states = submit(llm)
            run(llm)
            assert tokens(states) == expected


def test_prefixes_are_not_found_after_sleep(model: TinyModel) -> None:
    with open_llm(model) as llm:
        first = llm.generate(PROMPTS[5], greedy(3))[0]
        assert llm.generate(PROMPTS[5], greedy(3))[0].num_cached_tokens == 32
        llm.sleep()
        llm.wake_up()
        again = llm.generate(PROMPTS[5], greedy(3))[0]
        assert again.num_cached_tokens == 0
        assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_what_sleep_refuses(model: TinyModel) -> None:
    with open_llm(model) as llm:
        with pytest.raises(ConfigError, match="level=3"):
            llm.sleep(3)
        with pytest.raises(ConfigError, match="'weight'"):
            llm.wake_up(["weight"])
        llm.sleep()
        with pytest.raises(UnavailableError, match="weights are away"):
            llm.update_weights([])
        with pytest.raises(UnavailableError, match="sleeps"):
            llm.reconfigure(max_num_seqs=4)
    # closed while asleep


# -- weights -----------------------------------------------------------------------------------------------------------


def checkpoint(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield from open_checkpoint(str(path), "auto").tensors()


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_other_weights_in_the_middle(model: TinyModel, other: TinyModel, mode: str) -> None:
    """What was said stays said; what follows is what the other model says after it. Nothing is recorded again."""
    with open_llm(model, mode) as llm:
        states = submit(llm)
        for _ in range(9):
            llm.engine.step()
        llm.engine.settle()
        before = tokens(states)
        assert any(before)
        num_places = llm.update_weights(checkpoint(other.path))
        assert num_places == len(list(checkpoint(other.path)))
        recordings = llm.stats().recordings
        run(llm)
        assert llm.stats().recordings == recordings
        for prompt, said, all_said in zip(PROMPTS, before, tokens(states), strict=True):
            rest = NUM_TOKENS - len(said)
            assert all_said == [*said, *other.greedy([*prompt, *said], rest)]
        llm.reload_weights()
        assert llm.generate(PROMPTS[0], greedy(8))[0].outputs[0].token_ids == model.greedy(PROMPTS[0], 8)


def test_a_few_tensors_of_another_type(model: TinyModel) -> None:
    """Parts of fused matrices, cast to the parameter's type, one by one as a fresh engine would read them."""
    changes = {
        "model.layers.0.self_attn.k_proj.weight": lambda w: -w,
        "model.layers.1.mlp.up_proj.weight": lambda w: w.flip(0),
        "model.embed_tokens.weight": lambda w: w.roll(1, 0),
        "model.norm.weight": lambda w: w * 1.5,
    }
    tensors = {name: tensor.clone() for name, tensor in checkpoint(model.path)}
    with open_llm(model) as llm, open_llm(model) as fresh:
        for name, change in changes.items():
            tensors[name] = change(tensors[name]).to(torch.bfloat16)
            llm.update_weights([(name, tensors[name])])
            fresh.update_weights(tensors.items())
            outputs = [one.generate(PROMPTS, greedy(6)) for one in (llm, fresh)]
            said = [[output.outputs[0].token_ids for output in each] for each in outputs]
            assert said[0] == said[1]


def test_an_update_that_fails_half_way_stops_the_engine_until_it_is_whole(model: TinyModel) -> None:
    tensors = dict(checkpoint(model.path))
    name = "model.layers.1.mlp.down_proj.weight"
    with open_llm(model) as llm:
        expected = model.greedy(PROMPTS[0], 6)
        with pytest.raises(WeightError, match=r"'model\.layers\.9\.x' is no tensor of this model"):
            llm.update_weights([("model.layers.9.x", torch.zeros(1))])
        assert not llm.is_sleeping(), "nothing was written"
        assert llm.generate(PROMPTS[0], greedy(6))[0].outputs[0].token_ids == expected
        with pytest.raises(WeightError, match=rf"{name} has the shape \[3\], this model's is \[64, 96\]"):
            llm.update_weights([("model.norm.weight", tensors["model.norm.weight"] * 2), (name, torch.zeros(3))])
        with pytest.raises(UnavailableError, match=r"no weights: an update failed after 1 of \d+ tensors"):
            llm.generate(PROMPTS[0], greedy(6))
        llm.update_weights([(name, tensors[name])])
        assert llm.is_sleeping(), "still not all"
        llm.update_weights(tensors.items())
        assert llm.generate(PROMPTS[0], greedy(6))[0].outputs[0].token_ids == expected


def test_a_parameter_that_was_replaced_is_named(model: TinyModel) -> None:
    with open_llm(model) as llm:
        layer = llm.engine.runner.model.weights.layers[1]
        layer.down = layer.down.clone()
        with pytest.raises(StaleGraphError, match=r"weights\.layers\.1\.down"):
            llm.update_weights([])
