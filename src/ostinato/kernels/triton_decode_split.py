"""How the fused decode kernel shares a row among programs, and how their partial results become one.

Both follow from the rows' lengths, which are only known on the device. Where few rows have to keep the device busy,
each is shared among as many programs as the batch key gives it, which work out alike who has what; a short row keeps
few of them busy, the others end before they touch anything. Where the rows fill the device, what costs time is that
they are not alike: the longest one ends last, alone. Then a list of parts, made once a step, cuts the long ones.

Legend: R rows, G key/value heads, M query heads of a kv head (H / G), D head size.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels.splits import MIN_PART_UNITS, PART_ROWS, PART_UNIT

__all__ = ["merge_parts", "part_of", "plan_parts", "plan_parts_kernel", "share_row"]

_UNIT = tl.constexpr(PART_UNIT)
_SMALLEST = tl.constexpr(MIN_PART_UNITS)
_ROWS = tl.constexpr(PART_ROWS)


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
    """Writes `out` of one row's token and one kv head from its `num_active` parts, at `first` and every `step` behind,
    weighted by their log-sum-exp (Flash-Decoding, Dao et al. 2023). They come from other programs of the same launch,
    so loads bypass L1."""
    packed = tl.arange(0, LIVE_PAD)
    dims = tl.arange(0, HEAD_PAD)
    live = packed < GROUP
    filled = live[:, None] & (dims < HEAD_SIZE)[None, :]
    acc = tl.zeros([LIVE_PAD, HEAD_PAD], dtype=tl.float32)
    peak = tl.full([LIVE_PAD], float("-inf"), dtype=tl.float32)
    total = tl.zeros([LIVE_PAD], dtype=tl.float32)
    for begin in range(0, num_active, CHUNK):
        chunk = begin + tl.arange(0, CHUNK)
        part = (first + chunk * step)[:, None] * GROUP + packed[None, :]
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


@triton.jit
def part_of(parts, TILE: tl.constexpr):
    """(row, split, share) of the part that program 1 of the grid stands for, see `ops.plan_parts`; row -1: none."""
    packed = tl.load(parts + 1 + tl.program_id(1))
    row = tl.where(packed < 0, -1, packed % _ROWS)
    return row, packed // _ROWS, tl.load(parts) // TILE


@triton.jit(do_not_specialize=["num_rows", "num_parts", "places"])
def plan_parts_kernel(
    seq_lens,
    query_start,
    parts,
    num_rows,
    num_parts,
    places,
    NUM_KV_HEADS: tl.constexpr,
    RAGGED: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program."""
    rows = tl.arange(0, ROWS)
    mine = rows < num_rows
    lens = tl.load(seq_lens + rows, mask=mine, other=0)
    if RAGGED:
        begin = tl.load(query_start + rows, mask=mine, other=0)
        mine = mine & (tl.load(query_start + rows + 1, mask=mine, other=0) - begin == 1)
    units = tl.where(mine, tl.maximum(tl.cdiv(lens, _UNIT), 1), 0)
    total, longest, count = tl.sum(units, 0), tl.max(units, 0), tl.sum(mine.to(tl.int32), 0)
    programs = count * NUM_KV_HEADS
    one_wave = (programs <= places) & (programs * 4 >= places * 3)
    alike = longest * count * 4 <= total * 5
    share = tl.where(one_wave & alike, longest, tl.cdiv(total, num_parts - num_rows))
    share = tl.maximum(share, _SMALLEST)
    each = tl.where(mine, tl.cdiv(units, share), 0)
    first = tl.cumsum(each, 0) - each
    tl.store(parts, share * _UNIT)
    for index in range(0, tl.max(each, 0)):
        tl.store(parts + 1 + first + index, index * _ROWS + rows, mask=index < each)
    places_left = tl.arange(0, PARTS)
    tl.store(parts + 1 + places_left, -1, mask=(places_left >= tl.sum(each, 0)) & (places_left < num_parts))


def plan_parts(
    seq_lens: Tensor, query_start: Tensor, query_len: int, num_rows: int, num_kv_heads: int, places: int, parts: Tensor
) -> None:
    """As `reference_attention.plan_parts`."""
    num_parts = parts.shape[0] - 1
    plan_parts_kernel[(1,)](
        seq_lens, query_start, parts, num_rows, num_parts, places,
        NUM_KV_HEADS=num_kv_heads, RAGGED=query_len == 0, ROWS=triton.next_power_of_2(num_rows),
        PARTS=triton.next_power_of_2(num_parts), num_warps=4,
    )  # fmt: skip
