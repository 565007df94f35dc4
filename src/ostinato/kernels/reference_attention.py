"""Cache write and paged attention in plain torch: the specification, the CPU path, and the Triton kernels' oracle.

Legend: T tokens, R rows, S state rows, H query heads, G key/value heads, D head size, N blocks, B block size, W table
width, L the length of a row. The functions read lengths and slots on the host, as a kernel reads them on the device:
to a recording each call is one opaque node.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.kv_formats import decode, encode
from ostinato.kernels.reference import rope

__all__ = ["Row", "attention", "decode_attention", "kv_write", "live_rows"]

# Bounds the float32 score matrix of a long prompt at heads * 256 * length.
_MAX_QUERIES_PER_CHUNK = 256


def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None = None
) -> None:
    """Stores each token's key and value in the cache cell that `slot_mapping` names.

    k, v [T, G, D]; k_cache, v_cache [N, B, G, D], any strides; slot_mapping [>= T] int32: block * B + offset, where a
    negative slot marks a padded token, which writes nothing at all. kv_scales [2, G]: as `kv_formats.encode`.
    """
    num_tokens, block_size = k.shape[0], k_cache.shape[1]
    slots = slot_mapping[:num_tokens].long()
    live = slots >= 0
    if not bool(live.all()):
        slots, k, v = slots[live], k[live], v[live]
    block, offset = slots // block_size, slots % block_size
    k_scale, v_scale = (None, None) if kv_scales is None else kv_scales.unsqueeze(-1)  # [G, 1] each
    k_cache[block, offset] = encode(k, k_scale, k_cache.dtype)
    v_cache[block, offset] = encode(v, v_scale, v_cache.dtype)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    query_len: int,
    num_rows: int,
    num_splits: int,
    out: Tensor,
    kv_scales: Tensor | None = None,
    singles: bool = True,
) -> None:
    """Causal attention of each row's new tokens over its paged keys and values, the new ones included.

    q, out [T, H, D]; k_cache, v_cache [N, B, G, D], any strides; block_table [S, W]; row_slot, seq_lens [>= num_rows];
    query_start [>= num_rows + 1]. With `query_len` > 0 row r owns tokens [r * query_len, (r + 1) * query_len) and
    `query_start` is not read; with 0 it owns [query_start[r], query_start[r + 1]). The token at offset j of a row
    with n tokens sees positions below seq_len - n + j + 1. Tokens that see nothing, and tokens of no row, get zeros.

    Nothing outside the first seq_len positions of a row is read: neither table entries nor cells. Scores, softmax and
    the weighted sum are float32. kv_scales [2, G]: of what the cache holds. `singles` false: the rows of one token get
    zeros. The splits only matter on CUDA.
    """
    block_size = k_cache.shape[1]
    capacity = block_table.shape[1] * block_size
    rows = live_rows(row_slot, query_start, seq_lens, query_len, num_rows, num_tokens=q.shape[0])
    if not singles:
        rows = [row for row in rows if row.end - row.start != 1]
    out.zero_()
    if not rows:
        return
    lengths = [min(row.seq_len, capacity) for row in rows]
    num_blocks = [-(-length // block_size) for length in lengths]
    # One gather for the whole step: on short rows the calls cost more than the bytes.
    blocks = torch.cat([block_table[row.slot, :n] for row, n in zip(rows, num_blocks, strict=True)])
    keys, values = (cache.index_select(0, blocks).flatten(0, 1).transpose(0, 1) for cache in (k_cache, v_cache))
    k_scale, v_scale = (None, None) if kv_scales is None else kv_scales[..., None, None]  # [G, 1, 1] each
    grouped = (q.shape[0], k_cache.shape[2], q.shape[1] // k_cache.shape[2], q.shape[2])
    queries, outputs = (q.float() * scale).view(grouped), out.view(grouped)
    cell = 0
    for row, length, n in zip(rows, lengths, num_blocks, strict=True):
        span = slice(cell, cell + length)
        tokens = slice(row.start, row.end)
        seen_keys, seen_values = decode(keys[:, span], k_scale), decode(values[:, span], v_scale)
        _attend(queries[tokens], seen_keys, seen_values, row.seq_len, outputs[tokens])
        cell += n * block_size


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    seq_lens: Tensor,
    scale: float,
    num_rows: int,
    num_splits: int,
    out: Tensor,
    counters: Tensor,
    pdl: bool = False,
    kv_scales: Tensor | None = None,
    partials: Tensor | None = None,
) -> None:
    """`rope`, `kv_write` and `attention` of a step with one token a row in turn, but q and k stay as they are.

    `num_splits`, `counters` and `pdl` only matter to the CUDA kernel.
    """
    q, k = q.clone(), k.clone()
    rope(q, k, positions, cos_sin, q_norm, k_norm, eps)
    kv_write(k, v, k_cache, v_cache, slot_mapping, kv_scales)
    no_starts = row_slot  # not read with a query length
    attention(
        q, k_cache, v_cache, block_table, row_slot, no_starts, seq_lens, scale, 1, num_rows, num_splits, out, kv_scales
    )


class Row(NamedTuple):
    """A row of a step: its state row, its length, and the step's tokens that are its own."""

    slot: int
    seq_len: int
    start: int
    end: int


def live_rows(
    row_slot: Tensor, query_start: Tensor, seq_lens: Tensor, query_len: int, num_rows: int, num_tokens: int
) -> list[Row]:
    """What the arrays of `attention` say about each row that has tokens and keys, token ranges clamped to the step."""
    ends = range(0, (num_rows + 1) * query_len, query_len) if query_len > 0 else query_start[: num_rows + 1].tolist()
    edges = [min(end, num_tokens) for end in ends]
    slots, lengths = row_slot[:num_rows].tolist(), seq_lens[:num_rows].tolist()
    rows = (Row(*fields) for fields in zip(slots, lengths, edges[:-1], edges[1:], strict=True))
    return [row for row in rows if row.end > row.start and row.seq_len > 0]


def _attend(q: Tensor, keys: Tensor, values: Tensor, seq_len: int, out: Tensor) -> None:
    """One row: scaled q and out [n, G, H / G, D] against keys, values [G, L, D]; all but out float32.

    Each key head serves its H / G query heads in one matrix product.
    """
    num_queries, num_kv_heads, group, head_size = q.shape
    for begin in range(0, num_queries, _MAX_QUERIES_PER_CHUNK):
        chunk = q[begin : begin + _MAX_QUERIES_PER_CHUNK]
        n = chunk.shape[0]
        first_visible = seq_len - num_queries + begin + 1
        length = min(keys.shape[1], first_visible + n - 1)
        if length <= 0:
            continue
        packed = chunk.permute(1, 2, 0, 3).reshape(num_kv_heads, group * n, head_size)
        scores = torch.matmul(packed, keys[:, :length].transpose(1, 2))
        if n > 1:
            hidden = torch.arange(length) >= (first_visible + torch.arange(n)).unsqueeze(1)
            scores.view(num_kv_heads, group, n, length).masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        if first_visible <= 0:
            # A query that sees nothing has a row of -inf, whose softmax is NaN; its output is zero by definition.
            weights = weights.nan_to_num(nan=0.0)
        attended = torch.matmul(weights, values[:, :length]).view(num_kv_heads, group, n, head_size)
        out[begin : begin + n] = attended.permute(2, 0, 1, 3)
