"""Decode attention that takes raw q, k and v: qk-norm, rope, the cache write and attention in one launch.

One program serves one row, one kv head and one split. The row's older positions come from the cache; its own token's
key and value come from the projection's output, turned in registers, and are never read back. They belong to the row's
last active program, which alone writes them to the cache: no program reads a cell that another one of the same launch
writes.

At small batches this kernel is all latency, so what can be done early is. A program takes its range of tiles from the
last one backwards: only that tile can be partial or hold the new position, every other is whole and needs no mask, and
it can be in registers before the query is known. With several splits the last program of a (row, kv head) to finish
merges the parts. The counter is incremented with acquire-release order at device scope behind a barrier of the
program, so the merging program sees every part, and it sets the counter back to zero, so that a replay finds it as the
recording did.

Programmatic dependent launch (`pdl`): the kernel may start while its predecessor runs. It reads length, slot, table
and angles, loads its last tile of keys and values, and only then waits for the predecessor and lets its own successor
start; q, k, v and all that it writes come after. The wait is transitive as long as every kernel launched so waits: what
completed had waited in turn, so all earlier kernels are complete. (Programs that find no range end without waiting;
each row has one that does wait, and a kernel is complete when all its programs are.) The part before the wait has no
such promise: where kernels let their successors start before they wait, it may run while kernels much further back
still run. So what it reads must have been complete when some kernel in between was started: one launched in the
ordinary way, or one that waits before it lets its successor start. `prepare`, which writes the step's integers, is
launched in the ordinary way and the embedding lookup behind it waits first (see `triton_step`); the block table and the
older cells of this cache are from before `prepare`.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.kernels.triton_attention_decode import DecodeConfig, decode_config
from ostinato.kernels.triton_attention_tile import attend_tile, normalise
from ostinato.kernels.triton_decode_heads import load_angles, load_pairs, normed, prefetch_tile, turned
from ostinato.kernels.triton_decode_split import merge_parts, share_row
from ostinato.kernels.triton_kv_format import encoded, operand
from ostinato.kernels.triton_launch import KernelCall, starts_early

__all__ = [
    "FusedConfig",
    "decode_attention",
    "decode_call",
    "decode_fused_kernel",
    "fused_config",
]

_LOG2_E = 1.4426950408889634
_MERGED_PER_THREAD = 32  # floats of partial results that a merging thread has in flight


@dataclass(frozen=True, slots=True)
class FusedConfig:
    """Compile-time choices, a function of shapes and dtype alone."""

    tiles: DecodeConfig
    live_pad: int  # H / G, padded to a power of two
    chunk: int  # parts merged at a time
    vector: int  # neighbouring dimensions whose rotation partners are neighbours too


def fused_config(num_rows: int, group: int, head_size: int, half: int, element_size: int, norm: bool) -> FusedConfig:
    """`half`: rotated pairs of dimensions, half the width of the table of angles; `norm`: of queries and keys.

    Measured on an H200 (`benchmarks/kernel_decode_attention.py`, and `tune_few.py` for one to four rows). It is the
    latency of one program that counts: a large first tile, and threads enough to hold it.
    """
    tiles = decode_config(1, group, head_size, element_size)
    if element_size == 2:
        many_warps = tiles.head_pad <= 64 or (norm and num_rows <= 4) or tiles.num_warps > 4
        tile = min(8192 // tiles.head_pad, 128)
        tiles = replace(tiles, tile=tile, num_warps=8 if many_warps else 4, num_stages=1 if many_warps else 2)
    live_pad = triton.next_power_of_2(group)
    in_flight = _MERGED_PER_THREAD * 32 * tiles.num_warps
    return FusedConfig(
        tiles=tiles,
        live_pad=live_pad,
        chunk=min(max(in_flight // (live_pad * tiles.head_pad), 1), 8),
        vector=min(half & -half, 8),
    )


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
    kv_scales,  # [2, G] float32
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
    SCALED: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (G, R, splits). SPLIT: there may be several parts of a row. NATIVE: not in the interpreter."""
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = row.to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    slot = tl.load(slot_mapping + row)
    kv_len = tl.minimum(seq_len, table_width * BLOCK_SIZE)
    is_new = (slot >= 0) & (seq_len > 0)
    num_cached = tl.where(is_new, tl.minimum(seq_len - 1, kv_len), kv_len)
    share, num_active = share_row(kv_len, tl.num_programs(2), TILE)
    if split >= num_active:
        return
    owns_new = is_new & (split == num_active - 1)
    first_tile = split * share
    last_tile = tl.minimum(first_tile + share, tl.cdiv(kv_len, TILE)) - 1  # below first_tile where kv_len is 0

    table = block_table + tl.load(row_slot + row).to(tl.int64) * table_stride
    k_head = k_cache + kv_head * k_cache_stride_head
    v_head = v_cache + kv_head * v_cache_stride_head
    dims = tl.arange(0, HEAD_PAD)
    at = last_tile * TILE + tl.arange(0, TILE)
    is_cached = (at >= 0) & (at < num_cached)
    block = tl.load(table + at // BLOCK_SIZE, mask=is_cached, other=0).to(tl.int64)
    readable = is_cached[:, None] & (dims < HEAD_SIZE)[None, :]
    k_cells = k_head + (block * k_cache_stride_block + at % BLOCK_SIZE * k_cache_stride_cell)[:, None] + dims[None, :]
    v_cells = v_head + (block * v_cache_stride_block + at % BLOCK_SIZE * v_cache_stride_cell)[:, None] + dims[None, :]
    keys = tl.load(k_cells, mask=readable, other=0.0)
    values = tl.load(v_cells, mask=readable, other=0.0)
    if NATIVE and last_tile > first_tile:
        prefetch_tile(
            k_head, v_head, table, first_tile * TILE,
            k_cache_stride_block, k_cache_stride_cell, v_cache_stride_block, v_cache_stride_cell,
            HEAD_SIZE, BLOCK_SIZE, TILE,
        )  # fmt: skip
    angles = cos_sin + tl.load(positions + row).to(tl.int64) * cos_sin_stride
    cos, sin = load_angles(angles, HEAD_PAD, HALF, VECTOR)
    if NORM:
        q_scale, q_other_scale = load_pairs(q_weight, True, HEAD_SIZE, HEAD_PAD, HALF, VECTOR)
        k_scale, k_other_scale = load_pairs(k_weight, True, HEAD_SIZE, HEAD_PAD, HALF, VECTOR)
    if SCALED:
        key_unit = tl.load(kv_scales + kv_head)
        value_unit = tl.load(kv_scales + tl.num_programs(0) + kv_head)
        scale *= key_unit
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    packed = tl.arange(0, NUM_QUERIES)
    head = kv_head * GROUP + packed
    is_query = packed < GROUP
    # From here on keys and values are as stored, but in the type of the products.
    keys, values = operand(keys, q.dtype.element_ty, SCALED), operand(values, q.dtype.element_ty, SCALED)
    q_heads = q + token * q_stride_token + (head * q_stride_head)[:, None]
    queries, q_other = load_pairs(q_heads, is_query[:, None], HEAD_SIZE, HEAD_PAD, HALF, VECTOR)
    if owns_new:
        new_head = k + token * k_stride_token + kv_head * k_stride_head
        new_key, k_other = load_pairs(new_head, True, HEAD_SIZE, HEAD_PAD, HALF, VECTOR)
        filled = (dims < HEAD_SIZE)[None, :]
        v_head_new = v + token * v_stride_token + kv_head * v_stride_head
        new_value = tl.load(v_head_new + dims[None, :], mask=filled, other=0).to(values.dtype)
        if NORM:
            new_key, k_other = normed(new_key, k_other, k_scale, k_other_scale, eps, HEAD_SIZE)
        new_key = turned(new_key, k_other, cos, sin, NATIVE).to(keys.dtype)
        own_cell = (slot // BLOCK_SIZE).to(tl.int64), slot % BLOCK_SIZE
        k_cell = k_head + own_cell[0] * k_cache_stride_block + own_cell[1] * k_cache_stride_cell
        v_cell = v_head + own_cell[0] * v_cache_stride_block + own_cell[1] * v_cache_stride_cell
        if SCALED:
            stored_key = encoded(new_key, key_unit, k_cache.dtype.element_ty)
            stored_value = encoded(new_value, value_unit, v_cache.dtype.element_ty)
            tl.store(k_cell + dims[None, :], stored_key, mask=filled)
            tl.store(v_cell + dims[None, :], stored_value, mask=filled)
            new_key, new_value = stored_key.to(keys.dtype), stored_value.to(values.dtype)
        else:
            tl.store(k_cell + dims[None, :], new_key, mask=filled)
            tl.store(v_cell + dims[None, :], new_value, mask=filled)
        is_own = (at == seq_len - 1)[:, None]
        keys = tl.where(is_own, new_key, keys)
        values = tl.where(is_own, new_value, values)
    if NORM:
        queries, q_other = normed(queries, q_other, q_scale, q_other_scale, eps, HEAD_SIZE)
    queries = turned(queries, q_other, cos, sin, NATIVE)
    queries = operand(queries, q.dtype.element_ty, SCALED)

    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(((at >= 0) & (at < kv_len))[None, :], scores, float("-inf"))
    peak = tl.max(scores, 1)
    # Of a row without positions all scores are -inf, and -inf - -inf is NaN.
    weights = tl.exp2(scores - tl.where(peak == float("-inf"), 0.0, peak)[:, None])
    total = tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    for tile in range(first_tile, last_tile):
        acc, peak, total = attend_tile(
            queries, acc, peak, total, k_head, v_head, table, tile * TILE, 0, 0, scale,
            k_cache_stride_block, k_cache_stride_cell, v_cache_stride_block, v_cache_stride_cell,
            HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, TILE, False,
        )  # fmt: skip

    result = normalise(acc, total)
    if SCALED:
        result *= value_unit
    stored = is_query[:, None] & (dims < HEAD_SIZE)[None, :]
    if num_active == 1:
        out_tile = out + token * out_stride_token + (head * out_stride_head)[:, None] + dims[None, :]
        tl.store(out_tile, result.to(out.dtype.element_ty), mask=stored)
    elif SPLIT:
        pair = row * tl.num_programs(0) + kv_head
        first = pair.to(tl.int64) * tl.num_programs(2)
        part = (first + split) * GROUP + packed
        tl.store(partial_lse + part, peak + tl.log2(total), mask=is_query)
        tl.store(partial_acc + part[:, None] * HEAD_SIZE + dims[None, :], result, mask=stored)
        # Every thread's part is stored before the one thread that publishes them all counts this program in.
        tl.debug_barrier()
        if tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu") == num_active - 1:
            merge_parts(
                partial_acc, partial_lse, out, token, kv_head, first, first, 1, num_active,
                out_stride_token, out_stride_head, GROUP, HEAD_SIZE, HEAD_PAD, LIVE_PAD, CHUNK,
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
    num_rows: int,
    num_splits: int,
    out: Tensor,
    counters: Tensor,
    pdl: bool = False,
    kv_scales: Tensor | None = None,
    partials: Tensor | None = None,
    config: FusedConfig | None = None,
) -> None:
    """As `reference_attention.decode_attention`; `config` in place of the usual one. The grid follows from the
    arguments' shapes and the ints alone."""
    if q.shape[0] > num_rows:
        out[num_rows:].zero_()
    if num_rows > 0:
        decode_call(
            q, k, v, positions, cos_sin, q_norm, k_norm, eps, slot_mapping, k_cache, v_cache, block_table, row_slot,
            seq_lens, scale, num_rows, num_splits, out, counters, pdl, kv_scales, partials, config,
        )()  # fmt: skip


def decode_call(
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
    pdl: bool,
    kv_scales: Tensor | None,
    partials: Tensor | None,
    config: FusedConfig | None = None,
) -> KernelCall:
    """The one launch of `decode_attention`, which leaves tokens behind the last row as they are."""
    num_heads, head_size = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    half, norm, num_parts = cos_sin.shape[1] // 2, q_norm is not None, num_rows * num_splits
    split = num_splits > 1
    if split and partials is None:
        partials = torch.empty(num_parts * num_heads * (head_size + 1), dtype=torch.float32, device=q.device)
    partial_acc, partial_lse = (out, out)
    if split:
        assert partials is not None
        partial_acc, partial_lse = partials, partials[num_parts * num_heads * head_size :]
    group = num_heads // num_kv_heads
    config = config or fused_config(num_rows, group, head_size, half, q.element_size(), norm)
    args = (
        q, k, v, positions, cos_sin, q_norm, k_norm, slot_mapping, k_cache, v_cache, block_table, row_slot, seq_lens,
        kv_scales, out, partial_acc, partial_lse, counters, eps, scale * _LOG2_E, block_table.shape[1],
        cos_sin.stride(0), block_table.stride(0), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        *k_cache.stride()[:3], *v_cache.stride()[:3], *out.stride()[:2],
    )  # fmt: skip
    tiles, early = config.tiles, pdl and starts_early(q.device)
    options = dict(
        GROUP=group, HEAD_SIZE=head_size, HEAD_PAD=tiles.head_pad, HALF=half, VECTOR=config.vector,
        NORM=norm, BLOCK_SIZE=block_size, NUM_QUERIES=tiles.num_queries, TILE=tiles.tile, LIVE_PAD=config.live_pad,
        CHUNK=config.chunk, SPLIT=split, SCALED=kv_scales is not None,
        NATIVE=q.is_cuda,  # the interpreter, which runs on the CPU, has no inline assembly
        PDL=early, num_warps=tiles.num_warps, num_stages=tiles.num_stages, launch_pdl=early,
    )  # fmt: skip
    return KernelCall(decode_fused_kernel, (num_kv_heads, num_rows, num_splits), args, options)
