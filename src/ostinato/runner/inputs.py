"""The fixed buffers of a step: what `prepare` derives, what the layers share, what comes out.

Every recording reads and writes these addresses; they are sized for the largest step and never move. R rows at most,
T tokens at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from ostinato.kernels.decode_tiles import (
    DecodeTiles,
    TileConfig,
    num_partial_floats,
    smallest_tile,
    tile_programs,
    tile_unit,
)
from ostinato.kernels.flash_attention import FlashRows
from ostinato.models.config import ModelConfig
from ostinato.models.decoder import GatheredKV, Workspace

LOGPROB_COLUMNS = 22
"""The sampled token's, the log-sum-exp (its rank in the id table), and 20 alternatives."""


_LONGEST_TILE = 128


@dataclass(frozen=True, slots=True)
class GatherShape:
    """Of the workspace for gathered keys and values: `width` blocks of `block_size` tokens for each row."""

    width: int
    block_size: int
    dtype: torch.dtype  # of the KV cache

    def num_bytes(self, config: ModelConfig, max_rows: int) -> int:
        """Of keys and values for one layer: Rmax * W * B * 2 * G * D elements."""
        tokens = max_rows * self.width * self.block_size
        return tokens * 2 * config.num_kv_heads * config.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TileShape:
    """Of the list of tiles of decoding rows, and of what their parts go to: rows of up to `max_len` tokens."""

    max_len: int
    block_size: int
    num_sms: int  # multiprocessors of the device


class StepBuffers:
    """`pads` names the value that each derived input holds outside the live part of a step. `gather`: there is a
    workspace for gathered keys and values. `tiles`: rows may be attended to tile by tile (CUDA). `flash_width`: blocks
    of a row's table, where FlashAttention attends for prompts; else 0."""

    pads: ClassVar = {
        "token_ids": 0,
        "positions": 0,
        "slot_mapping": -1,
        "seq_lens": 0,
        "logit_index": 0,
        "sampled": -1,
    }

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_rows: int,
        max_tokens: int,
        ring_depth: int,
        dtype: torch.dtype,
        device: torch.device,
        gather: GatherShape | None = None,
        tiles: TileShape | None = None,
        flash_width: int = 0,
    ) -> None:
        def ints(size: int, pad: int) -> torch.Tensor:
            return torch.full((size,), pad, dtype=torch.int32, device=device)

        def floats(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.max_rows, self.max_tokens, self.ring_depth = max_rows, max_tokens, ring_depth
        self.token_ids = ints(max_tokens, 0)
        self.positions = ints(max_tokens, 0)
        self.slot_mapping = ints(max_tokens, -1)
        self.seq_lens = ints(max_rows, 0)
        self.logit_index = ints(max_rows, 0)
        self.sampled = ints(max_rows, -1)
        self.work = Workspace(
            stream=floats(max_tokens, config.hidden_size),
            qkv=floats(max_tokens, config.qkv_size),
            attention_out=floats(max_tokens, config.query_size),
            gathered=None if gather is None else _gathered(gather, config, max_rows, device),
        )
        # zero between steps: the last program of a row and head to finish resets its own
        self.attention_counters = ints(max_rows * config.num_kv_heads, 0)
        self._tiles, num_tiles, num_cells, num_floats = tiles, 0, 0, 0
        if tiles is not None:
            tile = smallest_tile(config.head_dim, dtype.itemsize)
            num_tiles = max_rows * -(-tiles.max_len // tile)
            num_cells = max_rows * -(-tiles.max_len // _LONGEST_TILE) * _LONGEST_TILE // min(tile, tiles.block_size)
            num_floats = num_partial_floats(config.num_heads, config.num_kv_heads, config.head_dim, tiles.num_sms)
        self.tile_starts = ints(max_rows + 1, 0)
        self.tile_info = ints(num_tiles * 2, 0)
        self.tile_cells = ints(num_cells, 0)
        self.attention_partials = floats(num_floats, kind=torch.float32)
        flash_rows = max_rows + 1 if flash_width else 0  # one of padding
        self.flash_page_table = ints(flash_rows * flash_width, 0).view(flash_rows, flash_width)
        self.flash_edges = ints(flash_rows + 1 if flash_width else 0, 0)
        self.flash_queries, self.flash_keys = ints(flash_rows, 0), ints(flash_rows, 0)
        self.logits = floats(max_rows, config.vocab_size)
        self.adjusted = floats(max_rows, config.vocab_size, kind=torch.float32)
        self.logprob_values = floats(max_rows, LOGPROB_COLUMNS, kind=torch.float32)
        self.logprob_ids = torch.zeros((max_rows, LOGPROB_COLUMNS), dtype=torch.int32, device=device)
        # The graph writes sampled tokens straight to host memory, one row of the ring per step, so that reading a
        # step's tokens needs no copy after the launch.
        self.ring = torch.full((ring_depth, max_rows), -1, dtype=torch.int32, pin_memory=device.type == "cuda")

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        names = (
            "attention_counters",
            "attention_partials",
            "tile_starts",
            "tile_info",
            "tile_cells",
            "flash_page_table",
            "flash_edges",
            "flash_queries",
            "flash_keys",
            "logits",
            "adjusted",
            "logprob_values",
            "logprob_ids",
            "ring",
        )
        for name in (*self.pads, *names):
            yield f"inputs.{name}", getattr(self, name)
        for name in ("stream", "qkv", "attention_out"):
            yield f"work.{name}", getattr(self.work, name)
        if (gathered := self.work.gathered) is not None:
            for name in ("pool", "block_table", "row_slot"):
                yield f"work.gathered.{name}", getattr(gathered, name)

    def decode_tiles(self, config: TileConfig, num_kv_heads: int, block_cells: int) -> DecodeTiles | None:
        """The list, cut as `config` says; None where no rows are attended to tile by tile."""
        if (shape := self._tiles) is None:
            return None
        units = config.tile // tile_unit(config.tile, shape.block_size)
        cells = self.tile_cells[: self.tile_cells.numel() // units * units].view(-1, units)
        num_programs = tile_programs(config, num_kv_heads, shape.num_sms)
        info = self.tile_info.view(-1, 2)
        return DecodeTiles(self.tile_starts, info, cells, config.tile, num_programs, block_cells)

    @property
    def has_flash(self) -> bool:
        """Whether FlashAttention attends for prompts."""
        return self.flash_page_table.numel() > 0

    def flash_rows(self, num_rows: int) -> FlashRows:
        """Where the rows of a step are written down for FlashAttention: `num_rows` and one of padding."""
        rows = num_rows + 1
        parts = (self.flash_page_table[:rows], self.flash_edges[: rows + 1])
        return FlashRows(*parts, self.flash_queries[:rows], self.flash_keys[:rows])

    @property
    def gather_bytes(self) -> int:
        """Of the workspace for gathered keys and values, which `num_bytes` includes."""
        gathered = self.work.gathered
        return 0 if gathered is None else gathered.pool.numel() * gathered.pool.element_size()

    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.named())


def _gathered(shape: GatherShape, config: ModelConfig, max_rows: int, device: torch.device) -> GatheredKV:
    num_blocks = max_rows * shape.width
    cells = (num_blocks, 2, shape.block_size, config.num_kv_heads, config.head_dim)
    return GatheredKV(
        pool=torch.zeros(cells, dtype=shape.dtype, device=device),
        block_table=torch.arange(num_blocks, dtype=torch.int32, device=device).view(max_rows, shape.width),
        row_slot=torch.arange(max_rows, dtype=torch.int32, device=device),
    )
