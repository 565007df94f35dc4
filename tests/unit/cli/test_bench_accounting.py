"""Bytes and arithmetic of a step, against counts made by hand; what a report may say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from ostinato.cli.bench.accounting import decode_bytes, floor_ms, mean_context, prefill_flops, resolve_bandwidth
from ostinato.cli.bench.record import portable, spread
from ostinato.cli.bench.tpot import Prompts, steps_between
from ostinato.cli.footprint import footprint
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.graphs.dispatch import StepCount
from ostinato.models.config import parse_config
from ostinato.models.weights import allocate


def test_decode_bytes(model: str) -> None:
    sizes = footprint(EngineConfig(model=model, load_format="dummy"), "cpu")
    assert decode_bytes(sizes, 0, 100.0) == sizes.read_bytes
    assert decode_bytes(sizes, 5, 10.5) - sizes.read_bytes == round(5 * 10.5 * (2 * 3 * 2 * 12 * 4))


def test_mean_context_is_that_of_the_decode_steps() -> None:
    contexts = [128 + step for step in range(1, 129)]
    assert mean_context(128, 129) == sum(contexts) / len(contexts)


def test_floor() -> None:
    assert floor_ms(4_000_000_000, 4.0) == pytest.approx(1.0)
    assert floor_ms(4_000_000_000, None) is None


@pytest.mark.parametrize("tied", [False, True])
def test_prefill_flops(model: str, tied: bool) -> None:
    fields = json.loads((Path(model) / "config.json").read_text())
    config = parse_config(fields | {"tie_word_embeddings": tied})
    weights = allocate(config, lambda shape: torch.empty(shape, device="meta"))
    head = config.vocab_size * config.hidden_size
    in_layers = sum(tensor.numel() for _, tensor in weights.named()) - head * (1 if tied else 2)
    by_hand = 0
    for position in range(7):
        by_hand += 2 * in_layers + 2 * 2 * config.num_layers * config.num_heads * config.head_dim * (position + 1)
    by_hand += 2 * head
    assert prefill_flops(config, 1, 7) == by_hand
    assert prefill_flops(config, 3, 7) == 3 * by_hand


def test_bandwidth() -> None:
    cpu = torch.device("cpu")
    assert resolve_bandwidth(4.5, cpu) == 4.5
    assert resolve_bandwidth(None, cpu) is None
    with pytest.raises(ConfigError, match="runs on cpu"):
        resolve_bandwidth("auto", cpu)


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.0, 8.0]) == {"min": 1.0, "median": 2.5, "max": 8.0, "spread": 7.0}


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("/data/models/llama-1b", "llama-1b"),
        ("/data/models/llama-1b/", "llama-1b"),
        ("--json=/tmp/x/decode.json", "--json=decode.json"),
        ("~/models/tiny", "tiny"),
        ("shapes/llama-1b", "shapes/llama-1b"),
        ("--batch", "--batch"),
        ("1,8", "1,8"),
    ],
)
def test_a_command_is_shown_without_folders(word: str, shown: str) -> None:
    assert portable(word) == shown


def test_prompts_repeat_and_stay_in_the_vocabulary() -> None:
    assert Prompts(97).draw(50) == Prompts(97).draw(50)
    assert Prompts(97, 1).draw(50) != Prompts(97).draw(50)
    assert set(Prompts(12).draw(200)) == {10, 11}
    assert Prompts(3).draw(4) == [2] * 4


def test_steps_between_counts() -> None:
    one = StepCount("FULL", None, "exact", 3, 3, 4)
    other = StepCount("NONE", None, "graphs are off", 2, 9, 9)
    grown = dataclasses.replace(one, count=5, live_tokens=7, padded_tokens=9)
    assert steps_between([one, other], [grown, other]) == [
        dataclasses.replace(one, count=2, live_tokens=4, padded_tokens=5)
    ]
    assert steps_between([], [other]) == [other]
