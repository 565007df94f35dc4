"""Ragged attention: rows of any query length (prompts, chunks, and decoding rows beside them) in one launch.

The tokens of a step are cut into query blocks that never straddle rows. The grid knows only shapes: T tokens and R rows
need at most cdiv(T, BLOCK) + R blocks, wherever the rows begin. Row r takes the blocks from
`query_start[r] // BLOCK + r` on, which leaves each row room for one partial block; a program finds its row by bisection
and leaves when its block lies past the row's end. The padded tokens behind the last row count as one more row, of
length 0, which makes them zeros.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels.triton_attention_tile import attend_tile, normalise
from ostinato.kernels.triton_kv_format import operand
from ostinato.kernels.triton_launch import KernelCall

__all__ = ["PrefillConfig", "prefill_call", "prefill_config", "prefill_kernel"]

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Compile-time choices of the ragged kernel, a function of shapes and dtype alone."""

    num_queries: int  # M: query tokens times heads of a group
    head_pad: int
    tile: int
    num_warps: int
    num_stages: int


def prefill_config(head_size: int, element_size: int, scaled: bool = False) -> PrefillConfig:
    """128 queries for two warpgroups in 16-bit types; small tiles for float32, which has no exact tensor core path, and
    where keys of a `scaled` cache take registers to convert."""
    head_pad = triton.next_power_of_2(head_size)
    if element_size > 2:
        return PrefillConfig(32 if head_pad <= 128 else 16, head_pad, tile=16, num_warps=4, num_stages=2)
    if head_pad <= 64:
        return PrefillConfig(num_queries=128, head_pad=head_pad, tile=128, num_warps=8, num_stages=3)
    if head_pad <= 128:
        return PrefillConfig(num_queries=128, head_pad=head_pad, tile=64, num_warps=8, num_stages=3)
    return PrefillConfig(num_queries=128, head_pad=head_pad, tile=16 if scaled else 32, num_warps=8, num_stages=2)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "table_width"])
def prefill_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    row_slot,
    query_start,
    seq_lens,
    kv_scales,  # [2, G] float32
    out,
    scale,
    num_tokens,
    num_rows,
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
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    INVARIANT: tl.constexpr,
    SCALED: tl.constexpr,
    SINGLES: tl.constexpr,
):
    """Grid (cdiv(T, NUM_QUERIES // GROUP) + R, G). INVARIANT: a query's bits do not depend on the queries beside it.
    SINGLES: rows of one token too; otherwise what is in `out` for them stays."""
    BLOCK: tl.constexpr = NUM_QUERIES // GROUP
    # Late query blocks of a row see the most keys: they start first, so that none is left for the end.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row, beyond = 0, num_rows + 1
    while beyond - row > 1:
        middle = (row + beyond) // 2
        reached = tl.load(query_start + middle) // BLOCK + middle <= index
        row, beyond = tl.where(reached, middle, row), tl.where(reached, beyond, middle)

    is_row = row < num_rows
    start = tl.load(query_start + row)
    end = tl.minimum(tl.load(query_start + row + 1, mask=is_row, other=num_tokens), num_tokens)
    num_queries = end - start
    first_query = (index - (start // BLOCK + row)) * BLOCK
    if not SINGLES:
        # The tokens behind the last row, even one alone, are nobody else's.
        num_queries = tl.where((num_queries == 1) & is_row, 0, num_queries)
    if first_query < num_queries:
        seq_len = tl.load(seq_lens + row, mask=is_row, other=0)
        slot = tl.load(row_slot + row, mask=is_row, other=0).to(tl.int64)
        table = block_table + slot * table_stride

        packed = tl.arange(0, NUM_QUERIES)
        dims = tl.arange(0, HEAD_PAD)
        offset = first_query + packed // GROUP
        head = kv_head * GROUP + packed % GROUP
        token = (start + offset).to(tl.int64)
        live = (packed < BLOCK * GROUP) & (offset < num_queries)
        filled = live[:, None] & (dims < HEAD_SIZE)[None, :]
        q_tile = q + (token * q_stride_token + head * q_stride_head)[:, None] + dims[None, :]
        queries = operand(tl.load(q_tile, mask=filled, other=0.0), q.dtype.element_ty, SCALED)

        kv_len = tl.minimum(seq_len, table_width * BLOCK_SIZE)
        num_before = seq_len - num_queries  # positions before the row's first query of this step
        visible = tl.minimum(num_before + offset + 1, kv_len)
        seen_by_all = tl.maximum(tl.minimum(num_before + first_query + 1, kv_len), 0)
        seen_by_any = tl.maximum(tl.minimum(num_before + tl.minimum(first_query + BLOCK, num_queries), kv_len), 0)
        # The masked step and the other may be contracted to different instructions, and which of them a query takes
        # through a tile depends on the queries in its block: so that its bits do not, all take the masked one. What a
        # tile adds to a query that sees none of it is exactly nothing: weights of 0, and a maximum that stays.
        num_full_tiles = 0 if INVARIANT else seen_by_all // TILE

        if SCALED:
            scale *= tl.load(kv_scales + kv_head)
        acc = tl.zeros([NUM_QUERIES, HEAD_PAD], dtype=tl.float32)
        peak = tl.full([NUM_QUERIES], float("-inf"), dtype=tl.float32)
        total = tl.zeros([NUM_QUERIES], dtype=tl.float32)
        k_head = k_cache + kv_head * k_stride_head
        v_head = v_cache + kv_head * v_stride_head
        for tile in range(0, num_full_tiles):
            acc, peak, total = attend_tile(
                queries, acc, peak, total, k_head, v_head, table, tile * TILE, kv_len, visible, scale,
                k_stride_block, k_stride_cell, v_stride_block, v_stride_cell,
                HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, TILE, False,
            )  # fmt: skip
        for tile in range(num_full_tiles, tl.cdiv(seen_by_any, TILE)):
            acc, peak, total = attend_tile(
                queries, acc, peak, total, k_head, v_head, table, tile * TILE, kv_len, visible, scale,
                k_stride_block, k_stride_cell, v_stride_block, v_stride_cell,
                HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, TILE, True,
            )  # fmt: skip
        result = normalise(acc, total)
        if SCALED:
            result *= tl.load(kv_scales + tl.num_programs(1) + kv_head)
        out_tile = out + (token * out_stride_token + head * out_stride_head)[:, None] + dims[None, :]
        tl.store(out_tile, result.to(out.dtype.element_ty), mask=filled)


def prefill_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    num_rows: int,
    out: Tensor,
    kv_scales: Tensor | None,
    invariant: bool = False,
    singles: bool = True,
) -> KernelCall:
    """`reference_attention.attention` with `query_len` 0; 16-bit or float32, last dimensions contiguous. `invariant`:
    as `ops.invariant_attention`. `singles`: rows of one token too."""
    num_tokens, num_heads, head_size = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    config = prefill_config(head_size, q.element_size(), k_cache.element_size() == 1)
    num_blocks = triton.cdiv(num_tokens, config.num_queries // group) + num_rows
    args = (
        q, k_cache, v_cache, block_table, row_slot, query_start, seq_lens, kv_scales, out,
        scale * _LOG2_E, num_tokens, num_rows, block_table.shape[1], block_table.stride(0),
        q.stride(0), q.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
        out.stride(0), out.stride(1),
    )  # fmt: skip
    options = dict(
        GROUP=group, HEAD_SIZE=head_size, HEAD_PAD=config.head_pad, BLOCK_SIZE=block_size,
        NUM_QUERIES=config.num_queries, TILE=config.tile, INVARIANT=invariant, SCALED=kv_scales is not None,
        SINGLES=singles, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return KernelCall(prefill_kernel, (num_blocks, num_kv_heads), args, options)
