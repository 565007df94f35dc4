"""Torch implementations of the ops around the forward pass and of its elementwise part. Shapes: see `ops`.

These are the spec, the oracle of the Triton kernels, and what a CPU runs. An op is a kernel, so it may look at the
contents of its tensors: work is done for live tokens only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def prepare(
    row_slot: Tensor,
    query_start: Tensor,
    num_computed: Tensor,
    num_tokens: Tensor,
    tokens: Tensor,
    block_table: Tensor,
    query_len: int,
    num_rows: int,
    block_size: int,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    logit_index: Tensor,
) -> None:
    """See `ops.prepare`."""
    scratch = tokens.shape[0] - 1
    limit = min(tokens.shape[1], block_table.shape[1] * block_size)
    for buffer, pad in ((token_ids, 0), (positions, 0), (slot_mapping, -1), (seq_lens, 0), (logit_index, 0)):
        buffer.fill_(pad)

    slots = row_slot[:num_rows].long()
    starts, lengths = _row_ranges(query_start, query_len, num_rows)
    live = slots != scratch
    seq_lens[:num_rows] = torch.where(live, (num_computed[slots] + lengths).clamp(max=limit), 0)
    logit_index[:num_rows] = torch.where(live, (starts + lengths - 1).clamp(min=0), 0)

    row = torch.repeat_interleave(lengths)
    token = torch.arange(row.numel())
    slot = slots[row]
    position = num_computed[slot] + token - starts[row]
    known = live[row] & (position < limit)
    token, slot, position = token[known], slot[known], position[known]
    token_ids[token] = tokens[slot, position]
    positions[token] = position.int()
    blocks = block_table[slot, position // block_size]
    slot_mapping[token] = blocks * block_size + (position % block_size).int()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * wide.to(x.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.add_rms_norm`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> None:
    """See `ops.rope`."""
    cos, sin = cos_sin[positions[: q.shape[0]]].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, rot / 2] each
    half = cos.shape[-1]
    for x, weight in ((q, q_weight), (k, k_weight)):
        if weight is not None:
            x.copy_(rms_norm(x, weight, eps))
        left, right = x[..., :half], x[..., half : 2 * half]
        wide_left, wide_right = left.float(), right.float()
        rotated_left = wide_left * cos - wide_right * sin
        right.copy_(wide_right * cos + wide_left * sin)
        left.copy_(rotated_left)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `ops.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def embed(token_ids: Tensor, weight: Tensor, out: Tensor) -> None:
    """See `ops.embed`."""
    torch.index_select(weight, 0, token_ids, out=out)


def scatter(arena: Tensor, patches: Tensor, count: int) -> None:
    """See `ops.scatter`."""
    arena[patches[:count, 0].long()] = patches[:count, 1]


def advance(
    row_slot: Tensor,
    query_start: Tensor,
    sampled: Tensor,
    query_len: int,
    num_rows: int,
    tokens: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
    output_counts: Tensor,
    step_count: Tensor,
    ring: Tensor,
) -> None:
    """See `ops.advance`."""
    published = ring[int(step_count) % ring.shape[0]]
    published.fill_(-1)
    step_count += 1

    slots = row_slot[:num_rows].long()
    _, lengths = _row_ranges(query_start, query_len, num_rows)
    row = (slots != tokens.shape[0] - 1).nonzero().squeeze(1)
    slot = slots[row]
    num_computed[slot] += lengths[row].int()
    samples = (num_computed[slot] >= num_tokens[slot]) & (num_tokens[slot] < tokens.shape[1])
    row, slot = row[samples], slot[samples]
    token = sampled[row]
    tokens[slot, num_tokens[slot].long()] = token
    num_tokens[slot] += 1
    output_counts[slot, token.long()] += 1
    published[row] = token


def _row_ranges(query_start: Tensor, query_len: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """First step token and number of tokens of each row, [num_rows] int64 both."""
    if query_len > 0:
        starts = torch.arange(0, num_rows * query_len, query_len)
        return starts, torch.full_like(starts, query_len)
    bounds = query_start[: num_rows + 1].long()
    return bounds[:-1], bounds.diff()
