"""Builds paged attention problems whose every unreadable cell is poison, with their dense answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.kernels import reference_tiles
from ostinato.kernels.decode_tiles import DecodeTiles, tile_unit

BLOCK_SIZE = 16
OUT_OF_RANGE = 2**30
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Attention = Callable[..., None]


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """`query_lens[r]` new tokens at the end of `seq_lens[r]` known ones; seq_len 0 marks a padded row."""

    q: Tensor  # [T, H, D], a strided view of a wider buffer
    pool: Tensor  # [N, 2, B, G, D]: NaN but for the live positions
    block_table: Tensor  # [S, W]: out-of-range ids beyond each length
    row_slot: Tensor
    query_start: Tensor
    seq_lens: Tensor
    keys: tuple[Tensor, ...]  # per row [L, G, D]
    values: tuple[Tensor, ...]
    query_lens: tuple[int, ...]
    scale: float

    def run(
        self,
        attention: Attention,
        query_len: int = 0,
        num_splits: int = 1,
        device: str = DEVICE,
    ) -> Tensor:
        """The op's output, from an `out` that is NaN beforehand and wider than the head size."""
        wide = torch.full((*self.q.shape[:2], self.q.shape[2] + 16), float("nan"), dtype=self.q.dtype, device=device)
        out = wide[..., : self.q.shape[2]]
        pool = self.pool.to(device)
        attention(
            self.q.to(device), pool[:, 0], pool[:, 1], self.block_table.to(device), self.row_slot.to(device),
            self.query_start.to(device), self.seq_lens.to(device), self.scale, query_len, len(self.query_lens),
            num_splits, out,
        )  # fmt: skip
        assert wide[..., self.q.shape[2] :].isnan().all(), "wrote outside `out`"
        return out.cpu()

    def tiles(self, query_len: int, tile: int, num_programs: int, device: str = DEVICE) -> DecodeTiles:
        """As the specification lists them, in a list with room for more, of which the rest is out of range."""
        num_rows = len(self.query_lens)
        num_tiles = sum(-(-max(seq_len, 1) // tile) for seq_len in self.seq_lens[:num_rows].tolist()) + 2
        starts = torch.full((num_rows + 2,), OUT_OF_RANGE, dtype=torch.int32)
        info = torch.full((num_tiles, 2), OUT_OF_RANGE, dtype=torch.int32)
        cells = torch.full((num_tiles, tile // tile_unit(tile, BLOCK_SIZE)), OUT_OF_RANGE, dtype=torch.int32)
        reference_tiles.plan_tiles(
            self.seq_lens, self.query_start, self.block_table, self.row_slot, query_len, num_rows, BLOCK_SIZE,
            2 * BLOCK_SIZE, tile, starts, info, cells,
        )  # fmt: skip
        return DecodeTiles(starts.to(device), info.to(device), cells.to(device), tile, num_programs, 2 * BLOCK_SIZE)

    def workspace(self, num_programs: int, device: str = DEVICE) -> tuple[Tensor, Tensor]:
        """Counters, and places of partial results that are NaN beforehand."""
        num_heads, head_size = self.q.shape[1:]
        counters = torch.zeros(len(self.query_lens) * self.pool.shape[3], dtype=torch.int32, device=device)
        return counters, torch.full((2 * num_programs * num_heads * (head_size + 1),), float("nan"), device=device)

    def expected(self) -> Tensor:
        """A double precision softmax written out position by position; it shares nothing with the implementations."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        group = self.q.shape[1] // self.pool.shape[3]
        for row, num_queries in enumerate(self.query_lens):
            start, seq_len = int(self.query_start[row]), int(self.seq_lens[row])
            for offset in range(num_queries):
                visible = seq_len - num_queries + offset + 1
                if visible <= 0:
                    continue
                keys = self.keys[row][:visible].double().repeat_interleave(group, dim=1)
                values = self.values[row][:visible].double().repeat_interleave(group, dim=1)
                scores = torch.einsum("hd,lhd->hl", self.q[start + offset].double(), keys) * self.scale
                out[start + offset] = torch.einsum("hl,lhd->hd", scores.softmax(dim=-1), values)
        return out


def make_case(
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    num_kv_heads: int,
    group: int,
    head_size: int,
    dtype: torch.dtype = torch.float32,
    num_pad_tokens: int = 0,
    seed: int = 0,
) -> AttentionCase:
    generator = torch.Generator().manual_seed(seed)
    num_rows, width = len(seq_lens), max(1, *(-(-n // BLOCK_SIZE) for n in seq_lens)) + 1
    num_blocks = 2 + sum(-(-n // BLOCK_SIZE) for n in seq_lens)
    pool = torch.full((num_blocks, 2, BLOCK_SIZE, num_kv_heads, head_size), float("nan"), dtype=dtype)
    table = torch.full((num_rows + 2, width + 3), OUT_OF_RANGE, dtype=torch.int32)[:, :width]
    slots = (torch.randperm(num_rows, generator=generator) + 1).to(torch.int32)
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    keys, values = [], []
    for slot, seq_len in zip(slots.tolist(), seq_lens, strict=True):
        kv = torch.randn((2, seq_len, num_kv_heads, head_size), generator=generator).to(dtype)
        for position in range(seq_len):
            if position % BLOCK_SIZE == 0:
                table[slot, position // BLOCK_SIZE] = free.pop()
            pool[int(table[slot, position // BLOCK_SIZE]), :, position % BLOCK_SIZE] = kv[:, position]
        keys.append(kv[0])
        values.append(kv[1])
    num_tokens = sum(query_lens)
    width_of_qkv = (num_kv_heads * group + 2, head_size)
    qkv = torch.randn((num_tokens + num_pad_tokens, *width_of_qkv), generator=generator).to(dtype)
    edges = [0]
    for n in query_lens:
        edges.append(edges[-1] + n)
    return AttentionCase(
        q=qkv[:, : num_kv_heads * group],
        pool=pool,
        block_table=table,
        row_slot=torch.cat([slots, slots.new_full((2,), OUT_OF_RANGE)]),
        query_start=torch.tensor([*edges, OUT_OF_RANGE], dtype=torch.int32),
        seq_lens=torch.tensor([*seq_lens, OUT_OF_RANGE], dtype=torch.int32),
        keys=tuple(keys),
        values=tuple(values),
        query_lens=tuple(query_lens),
        scale=head_size**-0.5,
    )
