"""The fixed buffers of a step: all of them have a name, so that memory tables, checks and graphs know them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ostinato.models.config import parse_config
from ostinato.runner.inputs import GatherShape, StepBuffers

CONFIG = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    for name in getattr(value, "__dict__", None) or getattr(value, "__slots__", ()):
        yield from tensors_in(getattr(value, name))


@pytest.mark.parametrize("gather", [None, GatherShape(width=4, block_size=16, dtype=torch.float32)])
def test_every_tensor_has_one_name(gather: GatherShape | None) -> None:
    buffers = StepBuffers(
        CONFIG,
        max_rows=3,
        max_tokens=8,
        ring_depth=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
        gather=gather,
    )
    named = dict(buffers.named())
    assert len(named) == len(list(buffers.named()))
    assert {id(tensor) for tensor in named.values()} == {id(tensor) for tensor in tensors_in(buffers)}
    assert ("work.gathered.pool" in named) == (gather is not None)
