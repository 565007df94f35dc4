"""Attention over rows as FlashAttention takes them, in plain torch: the specification and the CPU path. See `ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.kernels import reference_attention

__all__ = ["flash_attention", "plan_flash"]


def plan_flash(
    seq_lens: Tensor,
    query_start: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    num_rows: int,
    num_tokens: int,
    block_size: int,
    singles: bool,
    page_table: Tensor,
    edges: Tensor,
    queries: Tensor,
    keys: Tensor,
) -> None:
    """See `ops.plan_flash`."""
    capacity = block_table.shape[1] * block_size
    starts = [min(start, num_tokens) for start in query_start[: num_rows + 1].tolist()] + [num_tokens]
    for row in range(num_rows + 1):
        count = starts[row + 1] - starts[row]
        if row < num_rows and count == 1 and not singles:
            count = 0
        length = min(int(seq_lens[row]), capacity) if row < num_rows and count > 0 else 0
        edges[row], queries[row], keys[row] = starts[row], count, length
        num_blocks = -(-length // block_size)
        if num_blocks:
            page_table[row, :num_blocks] = block_table[int(row_slot[row]), :num_blocks]
    edges[num_rows + 1] = num_tokens


def flash_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    edges: Tensor,
    queries: Tensor,
    keys: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """See `ops.flash_attention`. A row's queries are the first ones of its tokens."""
    num_rows, whole = len(queries), torch.empty_like(out)
    slots = torch.arange(num_rows, dtype=torch.int32)
    starts, counts = edges.tolist(), queries.tolist()
    for row in range(num_rows):
        tokens = slice(starts[row], starts[row] + counts[row])
        own = torch.tensor([0, counts[row]], dtype=torch.int32)
        reference_attention.attention(
            q[tokens], k_cache, v_cache, page_table, slots[row:], own, keys[row:], scale, 0, 1, 1, whole[tokens]
        )
        out[tokens] = whole[tokens]
