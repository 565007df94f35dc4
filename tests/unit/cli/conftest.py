"""A model folder with a config and nothing else: enough for random weights and prompts of token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture
def small() -> list[str]:
    """Options of an engine that is ready at once."""
    options = "--load-format dummy --device cpu --max-num-seqs 4 --max-num-batched-tokens 32 --max-model-len 64"
    return options.split()
