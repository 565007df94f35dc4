"""Builds steps for the fused decode op: raw q, k, v beside a cache in which only older positions are not NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

BLOCK_SIZE = 16
OUT_OF_RANGE = 2**30
EPS = 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class FusedCase:
    """Row r has `seq_lens[r]` positions, the last of which is the step's; 0 marks a padded row."""

    q: Tensor  # [T, H, D], like k and v [T, G, D] a view of one buffer [T, (H + 2 G) D]
    k: Tensor
    v: Tensor
    positions: Tensor  # [Tmax]
    cos_sin: Tensor  # [P, rot]
    q_norm: Tensor | None
    k_norm: Tensor | None
    slot_mapping: Tensor  # [Tmax]
    pool: Tensor  # [N, 2, B, G, D]
    block_table: Tensor  # [S, W]: out-of-range ids beyond each length
    row_slot: Tensor
    seq_lens: Tensor
    num_rows: int

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.q.shape[2])

    def counters(self) -> Tensor:
        return torch.zeros(self.num_rows * self.k.shape[1] + 1, dtype=torch.int32, device=self.q.device)

    def on(self, device: str) -> FusedCase:
        """A deep copy, so that a run leaves the case as it is. The views stay views of one buffer."""
        num_q, num_kv = self.q.shape[1], self.k.shape[1]
        qkv = torch.cat([self.q, self.k, self.v], dim=1).to(device)
        copies: dict[str, Any] = {
            field.name: value.clone().to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        q, k, v = qkv.split((num_q, num_kv, num_kv), dim=1)
        # `clone` would close the gap between the table's rows.
        table = torch.nn.functional.pad(self.block_table, (0, 3)).to(device)[:, : self.block_table.shape[1]]
        return replace(self, **(copies | {"q": q, "k": k, "v": v, "block_table": table}))

    def run(
        self,
        op: Callable[..., None],
        num_splits: int = 1,
        counters: Tensor | None = None,
        pdl: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The output (from an `out` that is NaN beforehand and wider than a head) and the pool afterwards."""
        num_tokens, num_heads, head_size = self.q.shape
        wide = torch.full((num_tokens, num_heads, head_size + 16), float("nan"), dtype=self.q.dtype).to(self.q.device)
        out = wide[..., :head_size]
        before = self.q.clone(), self.k.clone()
        op(
            self.q, self.k, self.v, self.positions, self.cos_sin, self.q_norm, self.k_norm, EPS, self.slot_mapping,
            self.pool[:, 0], self.pool[:, 1], self.block_table, self.row_slot, self.seq_lens, self.scale,
            self.num_rows, num_splits, out, self.counters() if counters is None else counters, pdl,
        )  # fmt: skip
        assert torch.equal(self.q.nan_to_num(), before[0].nan_to_num()), "q was changed"
        assert torch.equal(self.k.nan_to_num(), before[1].nan_to_num()), "k was changed"
        assert wide[..., head_size:].isnan().all(), "wrote outside `out`"
        return out.cpu(), self.pool.cpu()


def make_case(
    seq_lens: Sequence[int],
    *,
    num_kv_heads: int = 1,
    group: int = 3,
    head_size: int = 64,
    rotated: int | None = None,
    norm: bool = False,
    dtype: torch.dtype = torch.float32,
    num_pad_tokens: int = 0,
    without_slot: Sequence[int] = (),
    seed: int = 0,
) -> FusedCase:
    """`without_slot`: rows whose token has no place in the cache; what its position holds there is not the step's."""
    generator = torch.Generator().manual_seed(seed)
    rotated = head_size if rotated is None else rotated
    num_rows, num_heads = len(seq_lens), num_kv_heads * group
    num_tokens = num_rows + num_pad_tokens
    width = max(1, *(-(-n // BLOCK_SIZE) for n in seq_lens)) + 1
    num_blocks = 2 + sum(-(-n // BLOCK_SIZE) for n in seq_lens)
    pool = torch.full((num_blocks, 2, BLOCK_SIZE, num_kv_heads, head_size), float("nan"), dtype=dtype)
    table = torch.full((num_rows + 2, width + 3), OUT_OF_RANGE, dtype=torch.int32)[:, :width]
    slots = (torch.randperm(num_rows, generator=generator) + 1).to(torch.int32)
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    positions = torch.zeros(num_tokens + 2, dtype=torch.int32)
    slot_mapping = torch.full((num_tokens + 2,), -1, dtype=torch.int32)
    qkv = torch.randn((num_tokens, num_heads + 2 * num_kv_heads, head_size), generator=generator).to(dtype)
    for row, seq_len in enumerate(seq_lens):
        entries = table[int(slots[row])]
        for position in range(seq_len):
            if position % BLOCK_SIZE == 0:
                entries[position // BLOCK_SIZE] = free.pop()
            block, cell = int(entries[position // BLOCK_SIZE]), position % BLOCK_SIZE
            if position < seq_len - 1 or row in without_slot:
                pool[block, :, cell] = torch.randn((2, num_kv_heads, head_size), generator=generator).to(dtype)
            else:
                positions[row] = position
                slot_mapping[row] = block * BLOCK_SIZE + cell
        if seq_len == 0:
            qkv[row] = float("nan")
    angles = torch.rand((max(*seq_lens, 1), rotated // 2), generator=generator) * 6.3
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    weights = 1 + torch.randn((2, head_size), generator=generator).to(dtype) / 4
    return FusedCase(
        q=q,
        k=k,
        v=v,
        positions=positions,
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1),
        q_norm=weights[0] if norm else None,
        k_norm=weights[1] if norm else None,
        slot_mapping=slot_mapping,
        pool=pool,
        block_table=table,
        row_slot=torch.cat([slots, slots.new_full((2,), OUT_OF_RANGE)]),
        seq_lens=torch.tensor([*seq_lens, OUT_OF_RANGE], dtype=torch.int32),
        num_rows=num_rows,
    )
