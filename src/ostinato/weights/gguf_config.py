"""Makes Hugging Face's `config.json` keys out of GGUF metadata."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ostinato.errors import ConfigError
from ostinato.weights.gguf_file import GgufFile
from ostinato.weights.names import ROPE_FREQS

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF architecture, which is also Hugging Face's model_type, to model class. Mistral's models are written as llama."""


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The model's configuration in Hugging Face's terms.

    `vocab_size` and `tie_word_embeddings` come from the tensors (embedding rows; no `output.weight`), which are the
    authority. `rope_freq_factors` is no key of Hugging Face's: it is there when the file has `rope_freqs.weight`, whose
    factors stand for the `rope_scaling` they were made from. Raises ConfigError for another architecture, a missing
    key, or a feature that is not supported.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported, only {', '.join(ARCHITECTURES)}"
        )
    if file.metadata.get("split.count", 1) > 1:
        raise ConfigError(f"{file.path}: is one part of a split GGUF; join the parts with `llama-gguf-split --merge`")
    reader = _Keys(file, architecture)
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path}: has no token_embd.weight, so it is not a whole model")
    num_heads = reader.integer("attention.head_count")
    num_kv_heads = reader.integer("attention.head_count_kv", num_heads)
    hidden_size = reader.integer("embedding_length")
    if reader.integer("expert_count", 0):
        raise ConfigError(f"{file.path}: is a mixture of experts, which is not supported")
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ConfigError(f"{file.path}: {num_heads} query heads cannot share {num_kv_heads} key/value heads")
    head_dim = reader.integer("attention.key_length", hidden_size // num_heads)
    if (rotary := reader.integer("rope.dimension_count", head_dim)) != head_dim:
        raise ConfigError(f"{file.path}: rotates {rotary} of {head_dim} dimensions; partial rotary is not supported")
    config: dict[str, Any] = {
        "model_type": architecture,
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": reader.integer("feed_forward_length"),
        "num_hidden_layers": reader.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": reader.integer("context_length"),
        "rope_theta": reader.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, reader),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if ROPE_FREQS in file.tensors:
        config["rope_freq_factors"] = _rope_freq_factors(file, head_dim)
    if 0 < (window := reader.integer("attention.sliding_window", 0)) < config["max_position_embeddings"]:
        config |= {"sliding_window": window, "use_sliding_window": True}
    return config


def _rope_freq_factors(file: GgufFile, head_dim: int) -> list[float]:
    """Divisor of each rotary frequency [head_dim / 2]: what GGUF stores of Llama 3's scaling instead of the formula."""
    tensor = file.tensors[ROPE_FREQS]
    if tensor.type.name != "F32" or tensor.shape != (head_dim // 2,):
        raise ConfigError(f"{file.path}: {ROPE_FREQS} is {tensor.type.name} {tensor.shape}, not F32 ({head_dim // 2},)")
    factors: list[float] = file.raw(tensor).view(np.float32).tolist()
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ConfigError(f"{file.path}: {ROPE_FREQS} holds factors that no frequency can be divided by: {factors}")
    return factors


def _rope_scaling(file: GgufFile, reader: _Keys) -> dict[str, Any] | None:
    kind = reader.value("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = reader.number("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = reader.integer("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ConfigError(f"{file.path}: rope scaling type {kind!r} is not supported; supported are none, linear, yarn")


class _Keys:
    """Metadata of one architecture: `llama.block_count` is asked for as `block_count`."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file, self._prefix = file, architecture + "."

    def value(self, key: str, default: Any = None) -> Any:
        value = self._file.metadata.get(self._prefix + key, default)
        if value is None:
            raise ConfigError(f"{self._file.path}: GGUF metadata lacks {self._prefix + key}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.value(key, default)
        if isinstance(value, list) and len(set(value)) == 1:  # per layer, but the same everywhere
            value = value[0]
        if not isinstance(value, int):
            raise ConfigError(f"{self._file.path}: {self._prefix + key} is {value!r}, one integer was expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
        if not isinstance(value, int | float):
            raise ConfigError(f"{self._file.path}: {self._prefix + key} is {value!r}, a number was expected")
        # Stored as float32: the shortest decimal that gives the same bits (1e-05, not 9.999999747e-06).
        return float(str(np.float32(value)))
