"""Inputs for the ops, and how to compare: the CUDA kernels against the CPU's, in float32 on the same values.

T tokens, R rows, S state rows, H query heads, G key/value heads, D head size, N blocks, B block size, W table width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.kernels import ops
from ostinato.kernels.flash_attention import missing

B = 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-15}
"""Relative error allowed per result: about two roundings of the type; for float32 some sums in another order."""


def assert_close(ours: Tensor, reference: Tensor, dtype: torch.dtype, factor: float = 1.0, what: str = "") -> None:
    """`ours` from the device against float32 `reference`; the error is measured against the values' own size."""
    got = ours.float().cpu()
    assert bool(got.isfinite().all()), f"{what}: not finite"
    scale = reference.abs().clamp(min=1.0)
    worst = ((got - reference).abs() / scale).max().item()
    assert worst < factor * ROUNDING[dtype], f"{what}: off by {worst:.2e}, allowed {factor * ROUNDING[dtype]:.2e}"


def need_flash(device: torch.device) -> None:
    """Skips where there is no FlashAttention-3, with what is missing."""
    why = missing(device)
    if why is not None:
        pytest.skip(f"no FlashAttention-3: {why}")


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """On the CPU, rounded to `dtype`, so that both sides start from the same values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """`lengths[r]` keys of which the last `query_lens[r]` are this step's; a length of 0 is a padded row.

    Everything that no row may read is NaN: cells past a row's length, blocks of no row, table entries past its blocks.
    """

    q: Tensor  # [T, H, D]
    k_cache: Tensor  # [N, B, G, D], strided
    v_cache: Tensor
    block_table: Tensor  # [S, W]
    row_slot: Tensor  # [R]
    query_start: Tensor  # [R + 1]
    seq_lens: Tensor  # [R]
    scale: float
    query_len: int
    num_rows: int

    def on(self, device: torch.device) -> AttentionCase:
        """The caches keep their strides: a layer's view of a pool with several layers."""
        moved: dict[str, Any] = {
            field.name: value.to(device) if isinstance(value := getattr(self, field.name), Tensor) else value
            for field in fields(self)
        }
        pool = torch.full((self.k_cache.shape[0], 2, 2, *self.k_cache.shape[1:]), float("nan"),
                          dtype=self.k_cache.dtype, device=device)  # fmt: skip
        pool[:, 1, 0], pool[:, 1, 1] = moved["k_cache"], moved["v_cache"]
        moved["k_cache"], moved["v_cache"] = pool[:, 1, 0], pool[:, 1, 1]
        return AttentionCase(**moved)

    def run(self, num_splits: int = 1) -> Tensor:
        out = torch.full_like(self.q, float("nan"))
        ops.attention(
            self.q, self.k_cache, self.v_cache, self.block_table, self.row_slot, self.query_start, self.seq_lens,
            self.scale, self.query_len, self.num_rows, num_splits, out,
        )  # fmt: skip
        return out

    def flash_rows(self, singles: bool = True) -> ops.FlashRows:
        """Of this ragged case, planned where it lies; what nobody may use is out of range."""
        rows, like = self.num_rows + 1, self.block_table
        shapes = ((rows, like.shape[1]), (rows + 1,), (rows,), (rows,))
        plan = ops.FlashRows(*(like.new_full(shape, 2**30) for shape in shapes))
        self.plan_flash(plan, singles)
        return plan

    def plan_flash(self, rows: ops.FlashRows, singles: bool = True) -> None:
        arrays = (self.seq_lens, self.query_start, self.block_table, self.row_slot)
        ops.plan_flash(*arrays, self.num_rows, self.q.shape[0], self.k_cache.shape[1], rows, singles)

    def run_flash(self, singles: bool = True) -> Tensor:
        """By FlashAttention."""
        out = torch.full_like(self.q, float("nan"))
        ops.flash_attention(self.q, self.k_cache, self.v_cache, self.flash_rows(singles), self.scale, out)
        return out

    def reference(self) -> Tensor:
        """The CPU's op in float32."""
        upcast = {name: getattr(self, name).float().cpu() for name in ("q", "k_cache", "v_cache")}
        rest = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in upcast}
        rest = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in rest.items()}
        return AttentionCase(**upcast, **rest).run()


def attention_case(
    dtype: torch.dtype,
    lengths: Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    query_len: int = 0,
    query_lens: Sequence[int] = (),
    width: int | None = None,
    block_size: int = B,
    num_padded_tokens: int = 0,
    seed: int = 0,
) -> AttentionCase:
    """Uniform with `query_len`, else ragged with `query_lens`. Blocks are dealt out in random order."""
    generator = torch.Generator().manual_seed(seed)
    each = [query_len] * len(lengths) if query_len else list(query_lens)
    num_rows, num_tokens = len(lengths), sum(each) + num_padded_tokens
    blocks = [-(-length // block_size) for length in lengths]
    table_width = width or max(*blocks, 1) + 1
    num_blocks = sum(blocks) + 3
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    keys = torch.full((num_blocks, block_size, num_kv_heads, head_size), float("nan"))
    values = keys.clone()
    table = torch.full((num_rows + 2, table_width), num_blocks - 1, dtype=torch.int32)
    slots = torch.randperm(num_rows + 1, generator=generator)[:num_rows].int()
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        mine, order = order[:count], order[count:]
        table[int(slots[row]), :count] = torch.tensor(mine, dtype=torch.int32)
        for cache in (keys, values):
            filled = torch.randn((length, num_kv_heads, head_size), generator=generator)
            for index, block in enumerate(mine):
                part = filled[index * block_size : (index + 1) * block_size]
                cache[block, : len(part)] = part
        if length == 0:
            slots[row] = num_rows + 1
    table[num_rows + 1] = 0
    starts = torch.tensor([0, *torch.tensor(each).cumsum(0).tolist()], dtype=torch.int32)
    return AttentionCase(
        q=normal(num_tokens, num_heads, head_size, seed=seed + 1, dtype=dtype),
        k_cache=keys.to(dtype),
        v_cache=values.to(dtype),
        block_table=table,
        row_slot=slots,
        query_start=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        scale=head_size**-0.5,
        query_len=query_len,
        num_rows=num_rows,
    )
