"""What a model and its options will take, worked out on tensors without memory. Nothing is read but file headers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ostinato.config import EngineConfig
from ostinato.engine.resolve import resolve_dtype, resolve_flash, resolve_gather, resolve_ladders, resolve_max_model_len
from ostinato.graphs.dispatch import Dispatcher
from ostinato.kernels.kv_formats import KVFormat, kv_format
from ostinato.models.config import ModelConfig, parse_config
from ostinato.models.weights import allocate, check_names, destinations
from ostinato.runner import memory
from ostinato.runner.inputs import StepBuffers, TileShape
from ostinato.runner.layout import ArenaLayout
from ostinato.runner.state import RequestState
from ostinato.weights.checkpoint import open_checkpoint

_META = torch.device("meta")
_NUM_SMS = 132
"""Multiprocessors of an H200; others have about as many."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes in bytes. `read_bytes` are the weights that every decode step reads: all but an untied embedding.

    `gather_bytes` are the workspace for gathered keys and values, 0 without one, which `buffer_bytes` leaves out.
    `activation_bytes` is an estimate: the temporaries of one layer over the largest step. The rest is exact.
    """

    model_config: ModelConfig
    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    weight_bytes: int
    read_bytes: int
    state_bytes: int
    buffer_bytes: int
    gather_bytes: int
    activation_bytes: int
    kv_token_bytes: int
    uniform_sizes: tuple[int, ...]
    mixed_sizes: tuple[int, ...]
    num_recordings: int

    @property
    def fixed_bytes(self) -> int:
        """All but the KV cache and what graphs and driver take."""
        return self.weight_bytes + self.state_bytes + self.buffer_bytes + self.gather_bytes + self.activation_bytes


def footprint(config: EngineConfig, device_type: str) -> Footprint:
    """Raises ConfigError or WeightError where `LLM` would, as the same code decides."""
    checkpoint = open_checkpoint(config.model, config.load_format)
    model_config = parse_config(checkpoint.config)
    dtype = resolve_dtype(config.dtype, model_config, torch.device(device_type))
    form = kv_format(config.kv_cache_dtype, dtype)
    max_model_len = resolve_max_model_len(config, model_config)
    uniform, mixed = resolve_ladders(config)
    weights = allocate(model_config, lambda shape: torch.empty(shape, dtype=dtype, device=_META))
    if config.load_format != "dummy":
        infos: dict[str, tuple[tuple[int, ...], object]] = {
            name: (info.shape, info.dtype) for name, info in checkpoint.tensor_infos().items()
        }
        check_names(model_config, destinations(model_config, weights), infos)
    layout = ArenaLayout(
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        table_width=-(-max_model_len // config.block_size),
        vocab_size=model_config.vocab_size,
    )
    buffers = StepBuffers(
        model_config,
        max_rows=config.max_num_seqs,
        max_tokens=config.max_num_batched_tokens,
        ring_depth=(config.max_in_flight or (2 if device_type == "cuda" else 1)) + 1,
        dtype=dtype,
        device=_META,
        gather=resolve_gather(config, max_model_len, form.dtype),
        tiles=TileShape(max_model_len, config.block_size, _NUM_SMS) if device_type == "cuda" else None,
        flash_width=layout.table_width if _uses_flash(config, model_config, form, dtype, device_type) else 0,
    )
    weight_bytes = weights.num_bytes()
    embed = weights.embed.numel() * dtype.itemsize
    return Footprint(
        model_config=model_config,
        dtype=str(dtype).removeprefix("torch."),
        kv_cache_dtype=form.name,
        max_model_len=max_model_len,
        weight_bytes=weight_bytes,
        read_bytes=weight_bytes - (0 if model_config.tie_word_embeddings else embed),
        state_bytes=RequestState(layout, model_config.vocab_size, _META).num_bytes(),
        buffer_bytes=buffers.num_bytes() - buffers.gather_bytes,
        gather_bytes=buffers.gather_bytes,
        activation_bytes=_activation_bytes(model_config, config.max_num_batched_tokens, dtype.itemsize),
        kv_token_bytes=memory.block_bytes(model_config, config.block_size, form) // config.block_size,
        uniform_sizes=uniform,
        mixed_sizes=mixed,
        num_recordings=len(Dispatcher(config.resolved_mode, uniform, mixed, config.max_num_seqs).keys()),
    )


def _uses_flash(
    config: EngineConfig, model_config: ModelConfig, form: KVFormat, dtype: torch.dtype, device_type: str
) -> bool:
    """For a device that is not here, what the option says."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return config.attention_backend == "FLASH_ATTN"
    return resolve_flash(config, model_config, form, dtype, torch.device(config.device or device_type))


def _activation_bytes(config: ModelConfig, num_tokens: int, itemsize: int) -> int:
    """Alive at once in the widest place, the MLP: residual, delta and normed states, gate and up, their product."""
    return num_tokens * itemsize * (3 * config.hidden_size + 3 * config.intermediate_size)
