"""How the fused decode kernel shares a row among programs, and how their partial results become one.

Both follow from the row's length, which is only known on the device, so every program of a row works them out alike.
A short row keeps few programs busy; the others end before they touch anything.

Legend: R rows, G key/value heads, M queries of a row's head group (query_len * H / G), D head size.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["merge_kernel", "merge_parts", "share_row"]


@triton.jit
def share_row(
    seq_lens,
    slot_mapping,
    row,
    num_splits,
    table_width,
    QUERY_LEN: tl.constexpr,
    QUERY_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """(seq_len, num_new, num_tiles, share, num_active) of a row: its length, how many of its last positions are this
    step's own (tokens without a slot have none), tiles of older positions, tiles per program, programs with work.

    The share is rounded up, which costs no time (the busiest program has as many tiles either way) and leaves fewer
    parts to merge. At least one program is active.
    """
    seq_len = tl.load(seq_lens + row)
    offsets = tl.arange(0, QUERY_PAD)
    slots = tl.load(slot_mapping + row * QUERY_LEN + offsets, mask=offsets < QUERY_LEN, other=-1)
    num_new = tl.minimum(tl.sum((slots >= 0).to(tl.int32), 0), seq_len)
    num_tiles = tl.cdiv(tl.minimum(seq_len - num_new, table_width * BLOCK_SIZE), TILE)
    share = tl.maximum(tl.cdiv(num_tiles, num_splits), 1)
    return seq_len, num_new, num_tiles, share, tl.maximum(tl.cdiv(num_tiles, share), 1)


@triton.jit
def merge_parts(
    partial_acc,  # [R, G, splits, M, D] float32, each part already divided by its own sum
    partial_lse,  # [R, G, splits, M] float32, base 2; -inf where a part's query saw nothing
    out,
    row,
    kv_head,
    num_kv_heads,
    num_splits,
    num_active,
    out_stride_token,
    out_stride_head,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    LIVE_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes `out` of one row and kv head from its first `num_active` parts, weighted by their log-sum-exp
    (Flash-Decoding, Dao et al. 2023). Parts come from other programs of the same launch, so loads bypass L1."""
    packed = tl.arange(0, LIVE_PAD)
    dims = tl.arange(0, HEAD_PAD)
    live = packed < QUERY_LEN * GROUP
    filled = live[:, None] & (dims < HEAD_SIZE)[None, :]
    first = (row.to(tl.int64) * num_kv_heads + kv_head) * num_splits
    acc = tl.zeros([LIVE_PAD, HEAD_PAD], dtype=tl.float32)
    peak = tl.full([LIVE_PAD], float("-inf"), dtype=tl.float32)
    total = tl.zeros([LIVE_PAD], dtype=tl.float32)
    for begin in range(0, num_active, CHUNK):
        chunk = begin + tl.arange(0, CHUNK)
        part = (first + chunk)[:, None] * (QUERY_LEN * GROUP) + packed[None, :]
        wrote = (chunk < num_active)[:, None]
        lse = tl.load(partial_lse + part, mask=wrote & live[None, :], other=float("-inf"), cache_modifier=".cg")
        cells = part[:, :, None] * HEAD_SIZE + dims[None, None, :]
        parts = tl.load(
            partial_acc + cells, mask=wrote[:, :, None] & filled[None, :, :], other=0.0, cache_modifier=".cg"
        )
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(lse - origin[None, :])
        decay = tl.exp2(peak - origin)
        acc = acc * decay[:, None] + tl.sum(parts * weights[:, :, None], 0)
        total = total * decay + tl.sum(weights, 0)
        peak = new_peak
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    token = row.to(tl.int64) * QUERY_LEN + packed // GROUP
    heads = out + token * out_stride_token + (kv_head * GROUP + packed % GROUP) * out_stride_head
    tl.store(heads[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=filled)


@triton.jit(do_not_specialize=["num_splits", "table_width"])
def merge_kernel(
    partial_acc,
    partial_lse,
    seq_lens,
    slot_mapping,
    out,
    num_splits,
    table_width,
    out_stride_token,
    out_stride_head,
    QUERY_LEN: tl.constexpr,
    QUERY_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LIVE_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (G, R): the merge as a launch of its own. A row with one active program has its output already."""
    kv_head, row = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    _, _, _, _, num_active = share_row(
        seq_lens, slot_mapping, row, num_splits, table_width, QUERY_LEN, QUERY_PAD, BLOCK_SIZE, TILE
    )
    if PDL:
        gdc_wait()  # the parts are the predecessor's; lengths and slots are older
    if num_active > 1:
        merge_parts(
            partial_acc, partial_lse, out, row, kv_head, tl.num_programs(0), num_splits, num_active,
            out_stride_token, out_stride_head, QUERY_LEN, GROUP, HEAD_SIZE, HEAD_PAD, LIVE_PAD, CHUNK,
        )  # fmt: skip
