"""How the fused decode kernel shares a row among programs, and how their partial results become one.

It follows from the rows' lengths, which are only known on the device. A row is shared among as many programs as the
batch key gives it, which work out alike who has what; a short row keeps few of them busy, the others end before they
touch anything. (Where the rows fill the device: `triton_decode_tiles`.)

Legend: M query heads of a kv head (H / G), D head size.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["merge_parts", "share_row"]


@triton.jit
def share_row(kv_len, num_splits, TILE: tl.constexpr):
    """(share, num_active) of a row: tiles per program, and programs with work, at least one.

    The share is rounded up, which costs no time (the busiest program has as many tiles either way) and leaves fewer
    parts to merge.
    """
    num_tiles = tl.cdiv(kv_len, TILE)
    share = tl.maximum(tl.cdiv(num_tiles, num_splits), 1)
    return share, tl.maximum(tl.cdiv(num_tiles, share), 1)


@triton.jit
def merge_parts(
    partial_acc,  # [..., M, D] float32, each part already divided by its own sum
    partial_lse,  # [..., M] float32, base 2; -inf where a part's query saw nothing
    out,
    token,
    kv_head,
    first,
    others,
    step,
    num_active,
    out_stride_token,
    out_stride_head,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    LIVE_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes `out` of one row's token and one kv head from its `num_active` parts, weighted by their log-sum-exp
    (Flash-Decoding, Dao et al. 2023): part 0 is at `first`, part i at `others + i * step`. They come from other
    programs of the same launch, so loads bypass L1."""
    packed = tl.arange(0, LIVE_PAD)
    dims = tl.arange(0, HEAD_PAD)
    live = packed < GROUP
    filled = live[:, None] & (dims < HEAD_SIZE)[None, :]
    acc = tl.zeros([LIVE_PAD, HEAD_PAD], dtype=tl.float32)
    peak = tl.full([LIVE_PAD], float("-inf"), dtype=tl.float32)
    total = tl.zeros([LIVE_PAD], dtype=tl.float32)
    for begin in range(0, num_active, CHUNK):
        chunk = begin + tl.arange(0, CHUNK)
        part = tl.where(chunk == 0, first, others + chunk * step)[:, None] * GROUP + packed[None, :]
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
    heads = out + token.to(tl.int64) * out_stride_token + (kv_head * GROUP + packed) * out_stride_head
    tl.store(heads[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=filled)
