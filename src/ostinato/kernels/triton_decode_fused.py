"""Decode attention that takes raw q, k and v: qk-norm, rope, the cache write and attention in one launch.

One program serves one row, one kv head and one split, as in `triton_attention_decode`. The row's older positions come
from the cache; its own tokens' keys and values come from the projection's output, turned in registers, and are never
read back. They belong to the row's last active program, which alone writes them to the cache: no program reads a cell
that another one of the same launch writes.

With several splits the last program of a (row, kv head) to finish merges the parts, if it is given counters; without
them a second kernel does. The counter is incremented with acquire-release order at device scope behind a barrier of
the program, so the merging program sees every part, and it sets the counter back to zero, so that a replay finds it as
the recording did.

Programmatic dependent launch (`pdl`): the kernel may start while its predecessor runs. It lets its own successor start
at once, reads lengths, slots, tables and angles, prefetches its first tile of keys and values, and only then waits for
the predecessor; q, k, v and all that it writes come after. The wait is transitive as long as every kernel launched so
waits: what completed had waited in turn, so all earlier kernels are complete. (Programs that find no range end without
waiting; each row has one that does wait, and a kernel is complete when all its programs are.) The part before the wait
has no such promise: where kernels trigger before they wait, as this one does, it may run while kernels much further
back still run. Only a launch *without* the attribute stops that, as it begins when all before it is complete. So `pdl`
asks for one between this kernel and whatever wrote the step's integers (`prepare`), the block table and the older
cells of this cache. The embedding lookup that follows `prepare` is one, and so is the first launch of the next step.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.kernels.triton_attention_decode import DecodeConfig, decode_config
from ostinato.kernels.triton_attention_tile import attend_tile, normalise
from ostinato.kernels.triton_decode_heads import load_angles, load_pairs, normed, prefetch_tile, turned
from ostinato.kernels.triton_decode_split import merge_kernel, merge_parts, share_row

__all__ = ["FusedConfig", "decode_attention", "decode_fused_kernel", "fused_config"]

_LOG2_E = 1.4426950408889634
_MIN_NEW_PAD = 16  # least inner dimension of a matrix product
_MERGED_PER_THREAD = 32  # floats of partial results that a merging thread has in flight


@dataclass(frozen=True, slots=True)
class FusedConfig:
    """Compile-time choices, a function of shapes and dtype alone."""

    tiles: DecodeConfig
    query_pad: int
    new_pad: int  # the step's own keys of a row, padded
    live_pad: int  # query_len * H / G, padded to a power of two
    chunk: int  # parts merged at a time
    vector: int  # neighbouring dimensions whose rotation partners are neighbours too


def fused_config(query_len: int, group: int, head_size: int, half: int, element_size: int) -> FusedConfig:
    """`half`: rotated pairs of dimensions, half the width of the table of angles."""
    tiles = decode_config(query_len, group, head_size, element_size)
    query_pad, live_pad = triton.next_power_of_2(query_len), triton.next_power_of_2(query_len * group)
    in_flight = _MERGED_PER_THREAD * 32 * tiles.num_warps
    return FusedConfig(
        tiles=tiles,
        query_pad=query_pad,
        new_pad=max(_MIN_NEW_PAD, query_pad),
        live_pad=live_pad,
        chunk=min(max(in_flight // (live_pad * tiles.head_pad), 1), 8),
        vector=min(half & -half, 8),
    )


@triton.jit
def _attend_new(queries, keys, values, first, num_new, visible, scale, NEW_PAD: tl.constexpr):
    """(acc, peak, total) of the step's own keys and values alone, which are positions [first, first + num_new)."""
    columns = tl.arange(0, NEW_PAD)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    seen = (columns < num_new)[None, :] & ((first + columns)[None, :] < visible[:, None])
    scores = tl.where(seen, scores, float("-inf"))
    peak = tl.max(scores, 1)
    # A query that has seen nothing has peak -inf, and -inf - -inf is NaN.
    weights = tl.exp2(scores - tl.where(peak == float("-inf"), 0.0, peak)[:, None])
    return tl.dot(weights.to(values.dtype), values, input_precision="ieee"), peak, tl.sum(weights, 1)


@triton.jit(do_not_specialize=["table_width"])
def decode_fused_kernel(
    q,
    k,
    v,
    positions,
    cos_sin,
    q_weight,
    k_weight,
    slot_mapping,
    k_cache,
    v_cache,
    block_table,
    row_slot,
    seq_lens,
    out,
    partial_acc,
    partial_lse,
    counters,
    eps,
    scale,
    table_width,
    cos_sin_stride,
    table_stride,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    k_cache_stride_block,
    k_cache_stride_cell,
    k_cache_stride_head,
    v_cache_stride_block,
    v_cache_stride_cell,
    v_cache_stride_head,
    out_stride_token,
    out_stride_head,
    QUERY_LEN: tl.constexpr,
    QUERY_PAD: tl.constexpr,
    NEW_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HALF: tl.constexpr,
    VECTOR: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    LIVE_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGE: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (G, R, splits). SPLIT: there are several splits. MERGE: the last of them to finish merges. NATIVE: not
    in the interpreter."""
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    seq_len, num_new, num_tiles, share, num_active = share_row(
        seq_lens, slot_mapping, row, tl.num_programs(2), table_width, QUERY_LEN, QUERY_PAD, BLOCK_SIZE, TILE
    )
    if split >= num_active:
        return
    owner = split == num_active - 1
    num_cached = tl.minimum(seq_len - num_new, table_width * BLOCK_SIZE)
    first_tile, last_tile = split * share, tl.minimum(split * share + share, num_tiles)
    table = block_table + tl.load(row_slot + row).to(tl.int64) * table_stride
    k_head = k_cache + kv_head * k_cache_stride_head
    v_head = v_cache + kv_head * v_cache_stride_head

    packed = tl.arange(0, NUM_QUERIES)
    dims = tl.arange(0, HEAD_PAD)
    offset = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    is_query = packed < QUERY_LEN * GROUP
    token = row.to(tl.int64) * QUERY_LEN + offset
    is_live = is_query & (seq_len > 0)
    new = tl.arange(0, NEW_PAD)
    new_token = row.to(tl.int64) * QUERY_LEN + new
    # Only the owner needs them; a token without a slot comes after those that have one.
    is_new = owner & (new < num_new)
    slots = tl.load(slot_mapping + new_token, mask=is_new, other=0)
    if QUERY_LEN == 1:
        angles = cos_sin + tl.load(positions + row).to(tl.int64) * cos_sin_stride
        new_angles = angles
    else:
        at = tl.load(positions + token, mask=is_live, other=0).to(tl.int64)
        angles = cos_sin + (at * cos_sin_stride)[:, None]
        new_at = tl.load(positions + new_token, mask=is_new, other=0).to(tl.int64)
        new_angles = cos_sin + (new_at * cos_sin_stride)[:, None]
    if NATIVE and last_tile > first_tile:
        prefetch_tile(
            k_head, v_head, table, first_tile * TILE, num_cached,
            k_cache_stride_block, k_cache_stride_cell, v_cache_stride_block, v_cache_stride_cell,
            HEAD_SIZE, BLOCK_SIZE, TILE,
        )  # fmt: skip
    cos, sin = load_angles(angles, HEAD_PAD, HALF, VECTOR)
    new_cos, new_sin = load_angles(new_angles, HEAD_PAD, HALF, VECTOR)
    if NORM:
        q_scale, q_other_scale = load_pairs(q_weight, True, HEAD_SIZE, HEAD_PAD, HALF, VECTOR)
        k_scale, k_other_scale = load_pairs(k_weight, True, HEAD_SIZE, HEAD_PAD, HALF, VECTOR)
    if PDL:
        gdc_wait()

    q_heads = q + (token * q_stride_token + head * q_stride_head)[:, None]
    k_heads = k + (new_token * k_stride_token + kv_head * k_stride_head)[:, None]
    queries, q_other = load_pairs(q_heads, is_live[:, None], HEAD_SIZE, HEAD_PAD, HALF, VECTOR)
    new_keys, k_other = load_pairs(k_heads, is_new[:, None], HEAD_SIZE, HEAD_PAD, HALF, VECTOR)
    new_filled = is_new[:, None] & (dims < HEAD_SIZE)[None, :]
    new_values = v + (new_token * v_stride_token + kv_head * v_stride_head)[:, None] + dims[None, :]
    new_values = tl.load(new_values, mask=new_filled, other=0.0).to(v_cache.dtype.element_ty)
    if NORM:
        queries, q_other = normed(queries, q_other, q_scale, q_other_scale, eps, HEAD_SIZE)
        new_keys, k_other = normed(new_keys, k_other, k_scale, k_other_scale, eps, HEAD_SIZE)
    queries = turned(queries, q_other, cos, sin, NATIVE)
    new_keys = turned(new_keys, k_other, new_cos, new_sin, NATIVE).to(k_cache.dtype.element_ty)
    blocks, cells = (slots // BLOCK_SIZE).to(tl.int64), slots % BLOCK_SIZE
    k_cells = k_head + (blocks * k_cache_stride_block + cells * k_cache_stride_cell)[:, None] + dims[None, :]
    v_cells = v_head + (blocks * v_cache_stride_block + cells * v_cache_stride_cell)[:, None] + dims[None, :]
    tl.store(k_cells, new_keys, mask=new_filled)
    tl.store(v_cells, new_values, mask=new_filled)

    acc = tl.zeros([NUM_QUERIES, HEAD_PAD], dtype=tl.float32)
    peak = tl.full([NUM_QUERIES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([NUM_QUERIES], dtype=tl.float32)
    visible = seq_len - QUERY_LEN + offset + 1
    if owner:
        # Before the loop, whose buffers then take the place of this product's operands in shared memory.
        acc, peak, total = _attend_new(
            queries, new_keys, new_values, seq_len - num_new, num_new, visible, scale, NEW_PAD
        )
    for tile in range(first_tile, last_tile):
        acc, peak, total = attend_tile(
            queries, acc, peak, total, k_head, v_head, table,
            tile * TILE, num_cached, tl.minimum(visible, num_cached), scale,
            k_cache_stride_block, k_cache_stride_cell, v_cache_stride_block, v_cache_stride_cell,
            HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, TILE, True,
        )  # fmt: skip

    result = normalise(acc, total)
    filled = is_query[:, None] & (dims < HEAD_SIZE)[None, :]
    if num_active == 1:
        out_tile = out + (token * out_stride_token + head * out_stride_head)[:, None] + dims[None, :]
        tl.store(out_tile, result.to(out.dtype.element_ty), mask=filled)
    elif SPLIT:
        pair = row * tl.num_programs(0) + kv_head
        part = (pair.to(tl.int64) * tl.num_programs(2) + split) * (QUERY_LEN * GROUP) + packed
        seen = total > 0.0
        lse = tl.where(seen, peak + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
        tl.store(partial_lse + part, lse, mask=is_query)
        tl.store(partial_acc + part[:, None] * HEAD_SIZE + dims[None, :], result, mask=filled)
        if MERGE:
            # Every thread's part is stored before the one thread that publishes them all counts this program in.
            tl.debug_barrier()
            if tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu") == num_active - 1:
                merge_parts(
                    partial_acc, partial_lse, out, row, kv_head, tl.num_programs(0), tl.num_programs(2), num_active,
                    out_stride_token, out_stride_head, QUERY_LEN, GROUP, HEAD_SIZE, HEAD_PAD, LIVE_PAD, CHUNK,
                )  # fmt: skip
                tl.store(counters + pair, 0)


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
    query_len: int,
    num_rows: int,
    num_splits: int,
    out: Tensor,
    counters: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """See `ops.decode_attention`. `query_len` at most 8; 16-bit or float32; last dimensions contiguous.

    The workspace of several splits is num_rows * query_len * H * num_splits * (D + 1) floats; inside a recording it
    comes from the graph's pool.
    """
    num_tokens = num_rows * query_len
    num_heads, head_size = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    group, half = num_heads // num_kv_heads, cos_sin.shape[1] // 2
    config = fused_config(query_len, group, head_size, half, q.element_size())
    split = num_splits > 1
    if split:
        num_parts = num_rows * num_splits * query_len * num_heads
        partial_acc = torch.empty((num_parts, head_size), dtype=torch.float32, device=q.device)
        partial_lse = torch.empty((num_parts,), dtype=torch.float32, device=q.device)
    else:
        partial_acc = partial_lse = out
    if num_tokens < out.shape[0]:
        out[num_tokens:].zero_()
    shape = {
        "QUERY_LEN": query_len, "QUERY_PAD": config.query_pad, "GROUP": group, "HEAD_SIZE": head_size,
        "HEAD_PAD": config.tiles.head_pad, "BLOCK_SIZE": block_size, "TILE": config.tiles.tile,
        "LIVE_PAD": config.live_pad, "CHUNK": config.chunk, "PDL": pdl,
    }  # fmt: skip
    decode_fused_kernel[(num_kv_heads, num_rows, num_splits)](
        q, k, v, positions, cos_sin, q_norm, k_norm, slot_mapping, k_cache, v_cache, block_table, row_slot, seq_lens,
        out, partial_acc, partial_lse, counters, eps, scale * _LOG2_E, block_table.shape[1],
        cos_sin.stride(0), block_table.stride(0),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
        out.stride(0), out.stride(1),
        **shape, NEW_PAD=config.new_pad, HALF=half, VECTOR=config.vector, NORM=q_norm is not None,
        NUM_QUERIES=config.tiles.num_queries, SPLIT=split, MERGE=split and counters is not None,
        NATIVE=q.is_cuda,  # the interpreter, which runs on the CPU, has no inline assembly
        num_warps=config.tiles.num_warps, num_stages=config.tiles.num_stages, launch_pdl=pdl,
    )  # fmt: skip
    if split and counters is None:
        merge_kernel[(num_kv_heads, num_rows)](
            partial_acc, partial_lse, seq_lens, slot_mapping, out, num_splits, block_table.shape[1],
            out.stride(0), out.stride(1), **shape, num_warps=config.tiles.num_warps, launch_pdl=pdl,
        )  # fmt: skip
