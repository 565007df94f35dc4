"""Decode attention: rows of one equal, short query length over long paged keys, split along the keys.

One program serves one row, one kv head and one split. The row's queries of the whole head group form the M side of the
matrix products (query_len * H / G, padded to at least 16), so each key is read once. A split's range follows from the
row's length, read on the device; the number of splits is the caller's, fixed per batch key. With several splits a
second kernel merges the partial results, weighted by their log-sum-exp (Flash-Decoding, Dao et al. 2023).
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels.triton_attention_tile import attend_tile, normalise
from ostinato.kernels.triton_kv_format import operand

__all__ = ["MAX_QUERY_LEN", "DecodeConfig", "combine_kernel", "decode_attention", "decode_config", "decode_kernel"]

MAX_QUERY_LEN = 8
"""Tokens of a row up to which its queries fit one tile; longer ones are the ragged kernel's."""

_LOG2_E = 1.4426950408889634
# One tile of keys. The compiler spends half the stages on the block table that the addresses come from: five leave two
# tiles of keys and two of values in flight, 72 KiB in all for a small group, so that three programs fit on a Hopper SM.
_TILE_BYTES = 16 * 1024
_NUM_STAGES = 5
# Partial results that a combining program holds in registers at once.
_COMBINE_CHUNK = 16


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Compile-time choices of the decode kernel, a function of shapes and dtype alone."""

    num_queries: int  # M: query_len * H / G, padded
    head_pad: int
    tile: int
    num_warps: int
    num_stages: int


def decode_config(query_len: int, group: int, head_size: int, element_size: int) -> DecodeConfig:
    """Chosen so that nothing spills (compiled for sm_90a): 16 KiB tiles in 16-bit types, small ones for float32.

    Float32 has no exact tensor core path; it unrolls into scalar products, whose registers grow with the tile.
    """
    num_queries = max(16, triton.next_power_of_2(query_len * group))
    head_pad = triton.next_power_of_2(head_size)
    if element_size > 2:
        return DecodeConfig(num_queries, head_pad, tile=16, num_warps=8, num_stages=3)
    tile = min(max(_TILE_BYTES // (head_pad * element_size), 16), 128)
    large = num_queries == 128 or num_queries * head_pad > 64 * 128
    return DecodeConfig(num_queries, head_pad, tile, num_warps=8 if large else 4, num_stages=_NUM_STAGES)


@triton.jit(do_not_specialize=["table_width"])
def decode_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    row_slot,
    seq_lens,
    kv_scales,  # [2, G] float32
    out,
    partial_acc,  # [T, H, splits, HEAD_SIZE] float32, each already divided by its own sum
    partial_lse,  # [T, H, splits] float32, base 2; -inf where the split saw nothing
    scale,
    table_width,
    table_stride,
    q_stride_token,
    q_stride_head,
    k_stride_block,
    k_stride_cell,
    k_stride_head,
    v_stride_block,
    v_stride_cell,
    v_stride_head,
    out_stride_token,
    out_stride_head,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Grid (G, R, splits). Writes `out` directly unless SPLIT."""
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads, num_splits = tl.num_programs(0) * GROUP, tl.num_programs(2)
    seq_len = tl.load(seq_lens + row)
    table = block_table + tl.load(row_slot + row).to(tl.int64) * table_stride

    kv_len = tl.minimum(seq_len, table_width * BLOCK_SIZE)
    num_tiles = tl.cdiv(kv_len, TILE)
    first_tile, last_tile = num_tiles * split // num_splits, num_tiles * (split + 1) // num_splits
    # An empty range runs no tile, reads no query, and with SPLIT writes only its -inf.
    busy = last_tile > first_tile

    packed = tl.arange(0, NUM_QUERIES)
    dims = tl.arange(0, HEAD_PAD)
    offset = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    live = packed < QUERY_LEN * GROUP
    token = (row * QUERY_LEN + offset).to(tl.int64)
    filled = live[:, None] & (dims < HEAD_SIZE)[None, :]
    q_tile = q + (token * q_stride_token + head * q_stride_head)[:, None] + dims[None, :]
    queries = operand(tl.load(q_tile, mask=filled & busy, other=0.0), q.dtype.element_ty, SCALED)
    visible = tl.minimum(seq_len - QUERY_LEN + offset + 1, kv_len)

    if SCALED:
        scale *= tl.load(kv_scales + kv_head)
    acc = tl.zeros([NUM_QUERIES, HEAD_PAD], dtype=tl.float32)
    peak = tl.full([NUM_QUERIES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([NUM_QUERIES], dtype=tl.float32)
    for tile in range(first_tile, last_tile):
        acc, peak, total = attend_tile(
            queries, acc, peak, total,
            k_cache + kv_head * k_stride_head, v_cache + kv_head * v_stride_head, table,
            tile * TILE, kv_len, visible, scale,
            k_stride_block, k_stride_cell, v_stride_block, v_stride_cell,
            HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, TILE, True,
        )  # fmt: skip
    result = normalise(acc, total)
    if SCALED:
        result *= tl.load(kv_scales + tl.num_programs(0) + kv_head)
    if SPLIT:
        part = (token * num_heads + head) * num_splits + split
        seen = total > 0.0
        lse = tl.where(seen, peak + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
        tl.store(partial_lse + part, lse, mask=live)
        tl.store(partial_acc + part[:, None] * HEAD_SIZE + dims[None, :], result, mask=filled & seen[:, None])
    else:
        out_tile = out + (token * out_stride_token + head * out_stride_head)[:, None] + dims[None, :]
        tl.store(out_tile, result.to(out.dtype.element_ty), mask=filled)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    partial_acc,
    partial_lse,
    out,
    num_splits,
    out_stride_token,
    out_stride_head,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (H, T). Merges one head's partial results; where no split saw anything the output is zero."""
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = (token * tl.num_programs(0) + head) * num_splits
    dims = tl.arange(0, HEAD_PAD)
    splits = tl.arange(0, SPLITS_PAD)
    lses = tl.load(partial_lse + first + splits, mask=splits < num_splits, other=float("-inf"))
    peak = tl.max(lses, 0)
    origin = tl.where(peak == float("-inf"), 0.0, peak)
    acc = tl.zeros([HEAD_PAD], dtype=tl.float32)
    total = tl.sum(tl.exp2(lses - origin), 0)
    for begin in tl.static_range(0, SPLITS_PAD, CHUNK):
        chunk = begin + tl.arange(0, CHUNK)
        lse = tl.load(partial_lse + first + chunk, mask=chunk < num_splits, other=float("-inf"))
        # A split that saw nothing has left its part of the workspace as it was.
        wrote = (lse > float("-inf"))[:, None] & (dims < HEAD_SIZE)[None, :]
        parts = tl.load(partial_acc + (first + chunk)[:, None] * HEAD_SIZE + dims[None, :], mask=wrote, other=0.0)
        acc += tl.sum(parts * tl.exp2(lse - origin)[:, None], 0)
    result = acc / tl.where(total > 0.0, total, 1.0)
    out_row = out + token * out_stride_token + head * out_stride_head + dims
    tl.store(out_row, result.to(out.dtype.element_ty), mask=dims < HEAD_SIZE)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    seq_lens: Tensor,
    scale: float,
    query_len: int,
    num_rows: int,
    num_splits: int,
    out: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """`reference_attention.attention` with `query_len` 1 to MAX_QUERY_LEN; 16-bit or float32, rows contiguous.

    The workspace of several splits is num_rows * query_len * H * num_splits * (D + 1) floats; inside a recording it
    comes from the graph's pool.
    """
    num_tokens = num_rows * query_len
    num_heads, head_size = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    config = decode_config(query_len, group, head_size, q.element_size())
    if num_splits > 1:
        partial_acc = torch.empty((num_tokens, num_heads, num_splits, head_size), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((num_tokens, num_heads, num_splits), dtype=torch.float32, device=q.device)
    else:
        partial_acc = partial_lse = out
    if num_tokens < out.shape[0]:
        out[num_tokens:].zero_()
    decode_kernel[(num_kv_heads, num_rows, num_splits)](
        q, k_cache, v_cache, block_table, row_slot, seq_lens, kv_scales, out, partial_acc, partial_lse,
        scale * _LOG2_E, block_table.shape[1], block_table.stride(0),
        q.stride(0), q.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
        out.stride(0), out.stride(1),
        QUERY_LEN=query_len, GROUP=group, HEAD_SIZE=head_size, HEAD_PAD=config.head_pad, BLOCK_SIZE=block_size,
        NUM_QUERIES=config.num_queries, TILE=config.tile, SPLIT=num_splits > 1, SCALED=kv_scales is not None,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        splits_pad = triton.next_power_of_2(num_splits)
        combine_kernel[(num_heads, num_tokens)](
            partial_acc, partial_lse, out, num_splits, out.stride(0), out.stride(1),
            HEAD_SIZE=head_size, HEAD_PAD=config.head_pad, SPLITS_PAD=splits_pad,
            CHUNK=min(splits_pad, _COMBINE_CHUNK), num_warps=4,
        )  # fmt: skip
