"""The products of some rows in the forward pass: deltas in parts, from layer to layer and behind the last one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import LLM
from ostinato.kernels.small_configs import SMALL_ROWS, Kind, SmallConfig
from ostinato.models import projections
from ostinato.models.config import parse_config
from ostinato.models.decoder import Decoder
from ostinato.models.weights import allocate
from ostinato.weights.checkpoint import open_checkpoint

from .conftest import TinyFactory
from .driving import ALWAYS, MODES, greedy
from .models import prompts_of

PROMPTS = prompts_of((3, 17, 9, 1, 30), 160, seed=71)
PARAMS = greedy(8, logprobs=1)


def generate(path: str, mode: str) -> tuple[list[Any], list[float]]:
    with LLM(
        path,
        device="cpu",
        max_model_len=64,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=40,
        cudagraph_mode=mode,
        check=ALWAYS,
    ) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS)]
    chosen = [table[token].logprob for o in outputs for table, token in zip(o.logprobs or (), o.token_ids, strict=True)]
    return [o.token_ids for o in outputs], chosen


@pytest.mark.parametrize("kinds", [("plain", "gated", "parts"), ("parts",), ("plain", "gated")], ids=str)
@pytest.mark.parametrize("arch", ["Llama", "Qwen2"])
def test_every_mode(
    tiny_model: TinyFactory, monkeypatch: pytest.MonkeyPatch, arch: str, kinds: tuple[Kind, ...]
) -> None:
    """With the ops of these kinds and the separate ops for the others, the answers of the plain projections."""
    path, asked = str(tiny_model(arch).path), set()
    expected, expected_logprobs = generate(path, "NONE")

    def config(kind: Kind, num_out: int, size: int, num_rows: int) -> SmallConfig | None:
        asked.add(kind)
        parts = 3 if kind == "parts" else 1
        return SmallConfig(16, 16, 32, parts, 1, 2, False, 0) if kind in kinds else None

    small = projections.SmallProjections()
    monkeypatch.setattr(projections, "small_config", config)
    monkeypatch.setattr(Decoder, "_projections", lambda *_: small)
    for mode in MODES:
        tokens, logprobs = generate(path, mode)
        assert tokens == expected, mode
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected_logprobs), atol=1e-4, rtol=0)
    assert asked == {"plain", "gated", "parts"}


def test_the_number_of_rows_says_which(tiny_model: TinyFactory) -> None:
    """On the CPU the plain ones, whatever the number; with the limits of a GPU, few, some and many rows."""
    config = parse_config(open_checkpoint(str(tiny_model("Llama").path)).config)
    weights = allocate(config, lambda shape: torch.zeros(shape, dtype=torch.bfloat16))
    model = Decoder(config, weights, max_model_len=16)
    assert {type(model._projections(n)) for n in (1, 8, 300)} == {projections.PlainProjections}
    assert model.kernel_sizes == ()
    model._max_few_rows, model._max_small_rows = 2, 256
    versions = [type(model._projections(n)).__name__.removesuffix("Projections") for n in (1, 2, 3, 8, 256, 257)]
    assert versions == ["FewRow", "FewRow", "Small", "Small", "Small", "Plain"]
    assert model.kernel_sizes == (1, 2, *SMALL_ROWS)


def test_warm_up_takes_every_size_once(tiny_model: TinyFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and eager steps of any number of rows then find their kernels: the sizes as far as a step's tokens go, with
    as many rows as it may have, and the largest step at the end."""
    monkeypatch.setattr(Decoder, "kernel_sizes", (1, 2, *SMALL_ROWS))
    seen: list[tuple[int, int]] = []
    with LLM(
        str(tiny_model("Llama").path),
        device="cpu",
        max_model_len=64,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=40,
        enforce_eager=True,
    ) as llm:
        runner = llm.engine.runner
        step = type(runner)._step
        monkeypatch.setattr(
            type(runner),
            "_step",
            lambda self, mode, key, *rest, **layers: (
                seen.append((key.num_tokens, key.num_rows)),
                step(self, mode, key, *rest, **layers),
            ),
        )
        runner.warm_up()
        monkeypatch.undo()
        assert seen == [(1, 1), (2, 2), (8, 5), (16, 5), (24, 5), (24, 5)]
        assert llm.generate(PROMPTS[:2], greedy(3))[0].outputs[0].token_ids
