"""The CUDA implementations of the ops around the forward pass: prepare, embed, scatter, advance. Semantics: see `ops`.

They move a few kilobytes each and are bound by latency: every load that can be issued early is.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.kernels.triton_launch import early, start

__all__ = [
    "advance",
    "advance_kernel",
    "embed",
    "embed_kernel",
    "prepare",
    "prepare_kernel",
    "scatter",
    "scatter_kernel",
]

PREPARE_TILE = 256
SCATTER_TILE = 256
ADVANCE_TILE = 256
EMBED_BLOCK = 1024


@triton.jit
def _row_range(query_start, query_len, rows, inside):
    """First step token and number of tokens of some rows."""
    ragged = inside & (query_len == 0)
    start = tl.load(query_start + rows, mask=ragged, other=0)
    end = tl.load(query_start + rows + 1, mask=ragged, other=0)
    return tl.where(query_len == 0, start, rows * query_len), tl.where(query_len == 0, end - start, query_len)


@triton.jit(do_not_specialize=["query_len", "num_rows", "num_search_steps"])
def prepare_kernel(
    row_slot,
    query_start,
    num_computed,
    tokens,
    block_table,
    token_ids,
    positions,
    slot_mapping,
    seq_lens,
    logit_index,
    query_len,
    num_rows,
    num_search_steps,
    scratch,
    limit,
    tokens_stride,
    table_stride,
    max_tokens,
    max_rows,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (max(Tmax, Rmax) / TILE,): as many tokens and rows each. BLOCK_SIZE is that of the cache.

    Launched in the ordinary way, and without letting its successor start early: whatever comes later may rely on all
    earlier steps, and on what this one writes, without waiting.
    """
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)

    # The rows: lengths, and where each has its last token.
    is_row = index < num_rows
    slot = tl.load(row_slot + index, mask=is_row, other=0)
    live = is_row & (slot != scratch)
    start, length = _row_range(query_start, query_len, index, is_row)
    total = tl.load(num_computed + slot, mask=live, other=0) + length
    tl.store(seq_lens + index, tl.where(live, tl.minimum(total, limit), 0), mask=index < max_rows)
    last = tl.maximum(start + length - 1, 0)
    tl.store(logit_index + index, tl.where(live, last, 0), mask=index < max_rows)

    # The tokens: the row of each is the last one that does not start behind it.
    low = tl.zeros([TILE], tl.int32)
    if query_len > 0:
        is_token = index < num_rows * query_len
        low = index // query_len
    else:
        is_token = index < tl.load(query_start + num_rows)
        high = tl.zeros([TILE], tl.int32) + num_rows
        for _ in range(num_search_steps):
            middle = (low + high) // 2
            behind = tl.load(query_start + middle, mask=is_token, other=0) > index
            high = tl.where(behind, middle, high)
            low = tl.where(behind, low, middle)
    start, length = _row_range(query_start, query_len, low, is_token)
    slot = tl.load(row_slot + low, mask=is_token, other=0).to(tl.int64)
    live = is_token & (slot != scratch)
    position = tl.load(num_computed + slot, mask=live, other=0) + index - start
    known = live & (position < limit)
    position = tl.where(known, position, 0)
    token = tl.load(tokens + slot * tokens_stride + position, mask=known, other=0)
    block = tl.load(block_table + slot * table_stride + position // BLOCK_SIZE, mask=known, other=0)
    tl.store(token_ids + index, token, mask=index < max_tokens)
    tl.store(positions + index, position, mask=index < max_tokens)
    cell = tl.where(known, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(slot_mapping + index, cell, mask=index < max_tokens)


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
    max_tokens, max_rows = token_ids.shape[0], seq_lens.shape[0]
    prepare_kernel[(triton.cdiv(max(max_tokens, max_rows), PREPARE_TILE),)](
        row_slot, query_start, num_computed, tokens, block_table,
        token_ids, positions, slot_mapping, seq_lens, logit_index,
        query_len, num_rows, num_rows.bit_length(),
        tokens.shape[0] - 1, min(tokens.shape[1], block_table.shape[1] * block_size),
        tokens.stride(0), block_table.stride(0), max_tokens, max_rows,
        BLOCK_SIZE=block_size, TILE=PREPARE_TILE, num_warps=4,
    )  # fmt: skip


@triton.jit
def embed_kernel(token_ids, weight, out, out_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (T, SIZE / BLOCK). Its successor may start once `prepare`, before it, is complete, and not earlier: kernels
    further on read the step's integers before they wait (see `triton_decode_fused`)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    row = tl.load(token_ids + token).to(tl.int64)
    value = tl.load(weight + row * SIZE + columns, mask=inside)
    tl.store(out + token.to(tl.int64) * out_stride + columns, value, mask=inside)


def embed(token_ids: Tensor, weight: Tensor, out: Tensor) -> None:
    """See `ops.embed`."""
    num_tokens, size = out.shape
    if num_tokens > 0:
        block = min(triton.next_power_of_2(size), EMBED_BLOCK)
        embed_kernel[(num_tokens, triton.cdiv(size, block))](
            token_ids, weight, out, out.stride(0), SIZE=size, BLOCK=block, num_warps=4, **early(out.device)
        )


@triton.jit(do_not_specialize=["count"])
def scatter_kernel(arena, patches, count, TILE: tl.constexpr):
    """Grid (count / TILE,)."""
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = index < count
    offset = tl.load(patches + 2 * index, mask=inside, other=0)
    value = tl.load(patches + 2 * index + 1, mask=inside, other=0)
    tl.store(arena + offset, value, mask=inside)


def scatter(arena: Tensor, patches: Tensor, count: int) -> None:
    """See `ops.scatter`."""
    if count > 0:
        scatter_kernel[(triton.cdiv(count, SCATTER_TILE),)](arena, patches, count, TILE=SCATTER_TILE, num_warps=4)


@triton.jit(do_not_specialize=["query_len", "num_rows"])
def advance_kernel(
    row_slot,
    query_start,
    sampled,
    tokens,
    num_tokens,
    num_computed,
    output_counts,
    step_count,
    ring,
    query_len,
    num_rows,
    scratch,
    limit,
    tokens_stride,
    counts_stride,
    ring_stride,
    ring_size,
    max_rows,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (1,): one program takes all rows, so that `step_count` moves once and after everybody has read it."""
    start(PDL)
    step = tl.load(step_count)
    published = ring + (step % ring_size).to(tl.int64) * ring_stride
    for first in range(0, max_rows, TILE):
        row = first + tl.arange(0, TILE)
        is_row = row < num_rows
        slot = tl.load(row_slot + row, mask=is_row, other=0).to(tl.int64)
        token = tl.load(sampled + row, mask=is_row, other=-1)
        live = is_row & (slot != scratch)
        _, length = _row_range(query_start, query_len, row, is_row)
        computed = tl.load(num_computed + slot, mask=live, other=0) + length
        known = tl.load(num_tokens + slot, mask=live, other=0)
        samples = live & (computed >= known) & (known < limit)
        count_at = output_counts + slot * counts_stride + token
        count = tl.load(count_at, mask=samples, other=0)
        tl.store(num_computed + slot, computed, mask=live)
        tl.store(tokens + slot * tokens_stride + known, token, mask=samples)
        tl.store(num_tokens + slot, known + 1, mask=samples)
        tl.store(count_at, count + 1, mask=samples)
        tl.store(published + row, tl.where(samples, token, -1), mask=row < max_rows)
    tl.debug_barrier()  # one thread stores the new count: every warp must have loaded the old one
    tl.store(step_count, step + 1)


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
    advance_kernel[(1,)](
        row_slot, query_start, sampled, tokens, num_tokens, num_computed, output_counts, step_count, ring,
        query_len, num_rows, tokens.shape[0] - 1, tokens.shape[1],
        tokens.stride(0), output_counts.stride(0), ring.stride(0), ring.shape[0], ring.shape[1],
        TILE=ADVANCE_TILE, num_warps=4, **early(row_slot.device),
    )  # fmt: skip
