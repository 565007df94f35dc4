"""Bytes and arithmetic that a step cannot do without, from the model's shape: the floors beside what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostinato.cli.bench.fresh import run_fresh
from ostinato.cli.bench.options import AUTO
from ostinato.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ostinato.cli.footprint import Footprint
    from ostinato.models.config import ModelConfig


def resolve_bandwidth(wanted: float | str | None, device: torch.device) -> float | None:
    """TB/s. `auto` measures it in a process that gives its memory back by ending. Raises ConfigError without CUDA."""
    if wanted is None or isinstance(wanted, float):
        return wanted
    assert wanted == AUTO
    if device.type != "cuda":
        raise ConfigError(f"--bandwidth auto measures a CUDA device, and this runs on {device}: give a number of TB/s")
    return float(run_fresh({"what": "bandwidth", "device": str(device)})["read_tb_s"])


def mean_context(prompt_len: int, output_len: int) -> float:
    """Tokens that a row attends to, over the decode steps of an output: from `prompt_len` + 1 to `prompt_len` +
    `output_len` - 1, as the first output token comes from the prompt's step."""
    return prompt_len + output_len / 2


def decode_bytes(sizes: Footprint, batch: int, context: float) -> int:
    """Read by one decode step: the weights once, and the keys and values of `batch` rows of `context` tokens."""
    return sizes.read_bytes + round(batch * context * sizes.kv_token_bytes)


def floor_ms(num_bytes: int, bandwidth_tb_s: float | None) -> float | None:
    return None if bandwidth_tb_s is None else num_bytes / (bandwidth_tb_s * 1e9)


def prefill_flops(config: ModelConfig, batch: int, prompt_len: int) -> int:
    """Of `batch` prompts: 2 for each weight of the layers and each token, 2 for each weight of the head and each
    prompt, whose last token alone needs logits, and causal attention, 4 * head size for each query head and each pair
    of a token and one at or before it."""
    embedding = config.vocab_size * config.hidden_size
    in_layers = config.num_parameters() - embedding * (1 if config.tie_word_embeddings else 2)
    pairs = prompt_len * (prompt_len + 1) // 2
    attention = 4 * config.num_layers * config.query_size * pairs
    return batch * (2 * in_layers * prompt_len + 2 * embedding + attention)
