"""What the options leave open, decided: device, dtype, limits, sizes to record."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.graphs.buckets import mixed_ladder, uniform_ladder
from ostinato.graphs.mode import RuntimeMode
from ostinato.kernels import flash_attention
from ostinato.kernels.kv_formats import KVFormat, kv_format
from ostinato.models.config import ModelConfig
from ostinato.runner.inputs import GatherShape
from ostinato.weights.base import Checkpoint


def resolve_device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but torch sees no CUDA device; use device='cpu' or leave it out")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name!r}, but there are {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_dtype(name: str, model_config: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        if device.type == "cpu":
            name = "float32"
        else:
            name = model_config.dtype if model_config.dtype in ("float16", "bfloat16") else "bfloat16"
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]


def resolve_kv_format(name: str, dtype: torch.dtype, device: torch.device) -> KVFormat:
    """Raises ConfigError for a format that the device cannot convert."""
    form = kv_format(name, dtype)
    if form.has_scales and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise ConfigError(
                f"kv_cache_dtype={name!r} needs a device of compute capability 8.9 or later, this one has "
                f"{capability[0]}.{capability[1]}: use kv_cache_dtype='auto'"
            )
    return form


def resolve_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(f"max_model_len={config.max_model_len} is above the model's {limit} positions")
    return config.max_model_len


def resolve_flash(
    config: EngineConfig, model_config: ModelConfig, form: KVFormat, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether FlashAttention attends for prompts. Raises ConfigError where it was asked for and cannot."""
    if config.attention_backend == "TRITON_ATTN" or config.batch_invariant:
        return False
    why = flash_attention.unsupported(
        model_config.head_dim,
        dtype,
        form.dtype,
        block_size=config.block_size,
        max_rows=config.max_num_seqs,
        max_tokens=config.max_num_batched_tokens,
    ) or flash_attention.missing(device)
    if why is not None and config.attention_backend == "FLASH_ATTN":
        raise ConfigError(f"attention_backend='FLASH_ATTN': {why}; use attention_backend='auto'")
    return why is None


def resolve_gather(config: EngineConfig, max_model_len: int, dtype: torch.dtype) -> GatherShape | None:
    """The workspace that `cudagraph_cut` takes, if any, for a KV cache of `dtype`."""
    if config.cudagraph_cut != "kv_gather":
        return None
    return GatherShape(-(-max_model_len // config.block_size), config.block_size, dtype)


def resolve_ladders(config: EngineConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(uniform sizes in requests, mixed sizes in tokens) that this mode records."""
    mode, sizes = config.resolved_mode, config.cudagraph_capture_sizes
    rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
    uniform: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    if mode.mixed_mode() is not RuntimeMode.NONE:
        mixed = mixed_ladder(tokens, sizes.get("mixed") if isinstance(sizes, Mapping) else sizes)
    if mode.decode_mode() is RuntimeMode.FULL:
        if isinstance(sizes, Mapping):
            return uniform_ladder(rows, sizes.get("uniform")), mixed
        # a user's list counts tokens for mixed batches too, and may go on above the rows
        own = None if sizes is None else [size for size in sizes if size <= rows]
        if sizes is not None and not own:
            raise ConfigError(f"cudagraph_capture_sizes={list(sizes)}: none is at most max_num_seqs={rows}")
        uniform = uniform_ladder(rows, own)
    return uniform, mixed


def num_in_flight(config: EngineConfig, device: torch.device) -> int:
    return config.max_in_flight or (2 if device.type == "cuda" else 1)


def eos_token_ids(checkpoint: Checkpoint, from_tokenizer: frozenset[int]) -> frozenset[int]:
    """The ids that end an output, of all places that name some."""
    found = set(from_tokenizer)
    for source in (checkpoint.config, checkpoint.generation_config):
        value = source.get("eos_token_id")
        found |= set(value) if isinstance(value, list) else {value} if isinstance(value, int) else set()
    return frozenset(found)
