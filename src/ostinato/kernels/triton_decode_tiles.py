"""Decode attention over a list of tiles: rows that fill the device, in equal shares whatever their lengths.

One program for each row and kv head would begin anew 2,000 times a layer, each time behind a chain of loads (length,
table, keys), and the longest row would end last, alone. So once a step `plan_tiles` lists the tiles of all rows, one
row behind the other, with what a program needs to load one: where its cells are, how many positions exist, whose it is.
Each layer then divides the list evenly among as many programs as the device runs at a time. A program walks over its
share in one loop, which loads tiles ahead across the borders of rows; at such a border it writes out one row and begins
the next. Only the first and the last row of a share may have parts elsewhere: those go to a workspace, and the last
program of a row to finish merges them (stream-K, Osama et al. 2023, and Flash-Decoding, Dao et al. 2023).

The counter of a merged row is incremented with acquire-release order at device scope behind a barrier of the program,
so the merging program sees every part, and it sets the counter back to zero.

Keys and values of the step's own tokens are in the cache before (`rope_write`, `kv_write`).

Legend: R rows, N tiles of the step, U cell indices of a tile, P programs of a kv head, M query heads of a kv head.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.kernels.decode_tiles import (
    FIRST_TILE,
    LAST_TILE,
    TILE_ROWS,
    VALID_SHIFT,
    DecodeTiles,
    TileConfig,
    block_cells,
    require_cells,
    tile_config,
    tile_unit,
)
from ostinato.kernels.triton_attention_tile import normalise
from ostinato.kernels.triton_decode_split import merge_parts
from ostinato.kernels.triton_kv_format import operand
from ostinato.kernels.triton_launch import KernelCall, starts_early

__all__ = [
    "attend_tiles",
    "attend_tiles_call",
    "attend_tiles_kernel",
    "merged_at_a_time",
    "plan_tiles",
    "plan_tiles_kernel",
]

_LOG2_E = 1.4426950408889634
_ROWS = tl.constexpr(TILE_ROWS)
_VALID = tl.constexpr(VALID_SHIFT)
_FIRST = tl.constexpr(FIRST_TILE)
_LAST = tl.constexpr(LAST_TILE)
_PLAN_TILES = 32
"""Tiles that a planning program lists at a time."""
_MERGED_FLOATS = 1024
"""Of parts merged at a time."""
_MIN_QUERIES = 16
"""Of a matrix product on tensor cores."""


@triton.jit(do_not_specialize=["num_rows", "table_width"])
def plan_tiles_kernel(
    seq_lens,
    query_start,
    block_table,
    row_slot,
    starts,
    info,
    cells,
    num_rows,
    table_width,
    table_stride,
    block_cells,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    RAGGED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (R,): one row each. Which tiles come before is for every program to count."""
    row = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    mine = rows < num_rows
    lens = tl.minimum(tl.load(seq_lens + rows, mask=mine, other=0), table_width * BLOCK_SIZE)
    token = row
    if RAGGED:
        begin = tl.load(query_start + rows, mask=mine, other=0)
        mine = mine & (tl.load(query_start + rows + 1, mask=mine, other=0) - begin == 1)
        token = tl.load(query_start + row)
    each = tl.where(mine, tl.maximum(tl.cdiv(lens, TILE), 1), 0)
    before = tl.sum(tl.where(rows < row, each, 0), 0)
    count = tl.sum(tl.where(rows == row, each, 0), 0)
    length = tl.sum(tl.where(rows == row, lens, 0), 0)
    tl.store(starts + row, before)
    if row == num_rows - 1:
        tl.store(starts + num_rows, before + count)
    table = block_table + tl.load(row_slot + row).to(tl.int64) * table_stride
    UNITS: tl.constexpr = TILE // UNIT
    for first in range(0, count, CHUNK):
        tile = first + tl.arange(0, CHUNK)
        valid = tl.minimum(tl.maximum(length - tile * TILE, 0), TILE)
        ends = tl.where(tile == 0, _FIRST, 0) | tl.where(tile == count - 1, _LAST, 0)
        at = info + 2 * (before + tile)
        tl.store(at, row | (valid << _VALID) | ends, mask=tile < count)
        tl.store(at + 1, token, mask=tile < count)
        unit = first * UNITS + tl.arange(0, CHUNK * UNITS)
        position = unit * UNIT
        block = tl.load(table + position // BLOCK_SIZE, mask=position < length, other=0)
        cell = block * block_cells + position % BLOCK_SIZE
        tl.store(cells + before * UNITS + unit, cell, mask=unit < count * UNITS)


def merged_at_a_time(live_pad: int, width: int) -> int:
    """Parts of `live_pad` heads, `width` floats each: a row has rarely more than two or three."""
    return max(min(_MERGED_FLOATS // (live_pad * width), 4), 1)


def plan_tiles(
    seq_lens: Tensor,
    query_start: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    query_len: int,
    num_rows: int,
    block_size: int,
    block_cells: int,
    tile: int,
    starts: Tensor,
    info: Tensor,
    cells: Tensor,
) -> None:
    """See `ops.plan_tiles`."""
    if num_rows == 0:
        starts[:1] = 0
        return
    plan_tiles_kernel[(num_rows,)](
        seq_lens, query_start, block_table, row_slot, starts, info, cells, num_rows, block_table.shape[1],
        block_table.stride(0),
        block_cells,
        BLOCK_SIZE=block_size, TILE=tile, UNIT=tile_unit(tile, block_size),
        RAGGED=query_len == 0, ROWS=triton.next_power_of_2(max(starts.shape[0] - 1, 1)), CHUNK=_PLAN_TILES, num_warps=4,
    )  # fmt: skip


@triton.jit
def _begin(program, share, longer):
    """First tile of a program: the first `longer` ones have one more than `share`."""
    return program * share + tl.minimum(program, longer)


@triton.jit
def _program_of(tile, share, longer):
    """Which program has a tile; `share` may be 0, if no tile lies behind those of the longer ones."""
    behind = tile - longer * (share + 1)
    return tl.where(behind < 0, tile // (share + 1), longer + behind // tl.maximum(share, 1))


@triton.jit
def _finish(
    row, first_tile, end_tile, kv_head, query_start, share, longer, partial_acc, partial_lse, out, counters,
    out_stride_token, out_stride_head, num_kv_heads,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, LIVE_PAD: tl.constexpr, CHUNK: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """Counts this program in as done with a row that others have parts of; the last one merges them."""
    first = _program_of(first_tile, share, longer)
    num_parts = _program_of(end_tile - 1, share, longer) - first + 1
    pair = row * num_kv_heads + kv_head
    if tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
        token = row
        if RAGGED:
            token = tl.load(query_start + row)
        # A program's first row has the first of its two places; where the row only begins behind that, the second.
        place = 2 * first.to(tl.int64)
        begins_inside = (first_tile > _begin(first, share, longer)).to(tl.int64)
        merge_parts(
            partial_acc, partial_lse, out, token, kv_head, (place + begins_inside) * num_kv_heads + kv_head,
            place * num_kv_heads + kv_head, 2 * num_kv_heads, num_parts, out_stride_token, out_stride_head,
            GROUP, HEAD_SIZE, HEAD_PAD, LIVE_PAD, CHUNK,
        )  # fmt: skip
        tl.store(counters + pair, 0)


@triton.jit
def _exp2(x, NATIVE: tl.constexpr):
    """2^x, numbers too small for a normal float32 as 0: one instruction, where `tl.exp2` scales what might be one."""
    if NATIVE:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit(do_not_specialize=["num_rows"])
def attend_tiles_kernel(
    q,
    k_cache,
    v_cache,
    starts,
    info,
    cells,
    query_start,
    kv_scales,  # [2, G] float32
    out,
    partial_acc,
    partial_lse,
    counters,
    scale,
    q_stride_token,
    q_stride_head,
    cell_stride,
    cache_stride_head,
    out_stride_token,
    out_stride_head,
    num_rows,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    NUM_QUERIES: tl.constexpr,
    LIVE_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    NATIVE: tl.constexpr,
    RAGGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (G, P). NATIVE: not in the interpreter. Keys and values have the same strides."""
    kv_head, program = tl.program_id(0), tl.program_id(1)
    num_kv_heads = tl.num_programs(0)
    num_tiles = tl.load(starts + num_rows)
    share, longer = num_tiles // tl.num_programs(1), num_tiles % tl.num_programs(1)
    begin, end = _begin(program, share, longer), _begin(program + 1, share, longer)
    if PDL:
        gdc_wait()
    if begin >= end:
        return
    # What is asked at the end, when it would cost time: which rows have parts elsewhere, and how many.
    first_word, last_word = tl.load(info + 2 * begin), tl.load(info + 2 * (end - 1))
    first_row, last_row = first_word % _ROWS, last_word % _ROWS
    began_before, goes_on = (first_word & _FIRST) == 0, (last_word & _LAST) == 0
    first_begins, first_ends = tl.load(starts + first_row), tl.load(starts + first_row + 1)
    last_begins, last_ends = tl.load(starts + last_row), tl.load(starts + last_row + 1)
    if SCALED:
        scale *= tl.load(kv_scales + kv_head)

    UNITS: tl.constexpr = TILE // UNIT
    dims = tl.arange(0, HEAD_PAD)
    places = tl.arange(0, TILE)
    k_head = k_cache + kv_head * cache_stride_head + dims[None, :]
    v_head = v_cache + kv_head * cache_stride_head + dims[None, :]
    packed = tl.arange(0, NUM_QUERIES)
    is_query = packed < GROUP
    heads = (kv_head * GROUP + packed)[:, None]
    stored = is_query[:, None] & (dims < HEAD_SIZE)[None, :]
    q_heads = q + heads * q_stride_head + dims[None, :]
    out_heads = out + heads * out_stride_head + dims[None, :]
    first_place = (2 * program * num_kv_heads + kv_head).to(tl.int64) * GROUP + packed
    acc = tl.zeros([NUM_QUERIES, HEAD_PAD], dtype=tl.float32)
    peak = tl.full([NUM_QUERIES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([NUM_QUERIES], dtype=tl.float32)
    whole = not began_before  # whether the present row has begun here
    for tile in tl.range(begin, end, num_stages=STAGES):
        word = tl.load(info + 2 * tile)
        token = tl.load(info + 2 * tile + 1).to(tl.int64)
        cell = tl.load(cells + tile * UNITS + places // UNIT) + places % UNIT
        exists = places < ((word >> _VALID) & 0xFF)
        readable = exists[:, None] & (dims < HEAD_SIZE)[None, :]
        at = (cell.to(tl.int64) * cell_stride)[:, None]
        keys = operand(tl.load(k_head + at, mask=readable, other=0.0), q.dtype.element_ty, SCALED)
        values = operand(tl.load(v_head + at, mask=readable, other=0.0), q.dtype.element_ty, SCALED)
        if SCALED and NATIVE:
            # What the compiler cannot see through it cannot move. Converted in the layout of the product, each value
            # would come from shared memory by itself, a byte at a time.
            pack: tl.constexpr = 32 // values.dtype.primitive_bitwidth
            values = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [values], values.dtype, is_pure=False, pack=pack
            )  # fmt: skip
        queries = tl.load(q_heads + token * q_stride_token, mask=stored, other=0.0)
        scores = tl.dot(operand(queries, q.dtype.element_ty, SCALED), tl.trans(keys), input_precision="ieee")
        scores = tl.where(exists[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        # Of a row without positions all scores are -inf, and -inf - -inf is NaN.
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = _exp2(scores * scale - origin[:, None], NATIVE)
        decay = _exp2(peak - origin, NATIVE)
        peak = new_peak
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
        if (word & _LAST) != 0:
            result = normalise(acc, total)
            if SCALED:
                result *= tl.load(kv_scales + num_kv_heads + kv_head)
            tl.store(out_heads + token * out_stride_token, result.to(out.dtype.element_ty), mask=stored & whole)
            partial = partial_acc + first_place[:, None] * HEAD_SIZE + dims[None, :]
            tl.store(partial, result, mask=stored & (not whole))
            tl.store(partial_lse + first_place, peak + tl.log2(total), mask=is_query & (not whole))
            # The next row takes nothing over, not even a NaN.
            whole = True
            acc = tl.zeros([NUM_QUERIES, HEAD_PAD], dtype=tl.float32)
            peak = tl.full([NUM_QUERIES], float("-inf"), dtype=tl.float32)
            total = tl.zeros([NUM_QUERIES], dtype=tl.float32)

    if PDL:
        gdc_launch_dependents()
    if goes_on:
        place = first_place + (last_begins > begin).to(tl.int64) * num_kv_heads * GROUP
        result = normalise(acc, total)
        if SCALED:
            result *= tl.load(kv_scales + num_kv_heads + kv_head)
        tl.store(partial_acc + place[:, None] * HEAD_SIZE + dims[None, :], result, mask=stored)
        tl.store(partial_lse + place, peak + tl.log2(total), mask=is_query)
    # Every thread's part is stored before the one thread that publishes them all counts this program in.
    tl.debug_barrier()
    if began_before:
        _finish(
            first_row, first_begins, first_ends, kv_head, query_start, share, longer, partial_acc, partial_lse, out,
            counters, out_stride_token, out_stride_head, num_kv_heads, GROUP, HEAD_SIZE, HEAD_PAD, LIVE_PAD, CHUNK,
            RAGGED,
        )  # fmt: skip
    if goes_on and (first_row != last_row or not began_before):
        _finish(
            last_row, last_begins, last_ends, kv_head, query_start, share, longer, partial_acc, partial_lse, out,
            counters, out_stride_token, out_stride_head, num_kv_heads, GROUP, HEAD_SIZE, HEAD_PAD, LIVE_PAD, CHUNK,
            RAGGED,
        )  # fmt: skip


def attend_tiles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    info: Tensor,
    cells: Tensor,
    query_start: Tensor,
    scale: float,
    query_len: int,
    num_rows: int,
    tile: int,
    num_programs: int,
    out: Tensor,
    counters: Tensor,
    partials: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """See `ops.attend_tiles`."""
    if num_rows > 0:
        attend_tiles_call(
            q, k_cache, v_cache, DecodeTiles(starts, info, cells, tile, num_programs, block_cells(k_cache)),
            query_start, scale, query_len, num_rows, out, counters, partials, kv_scales,
        )()  # fmt: skip


def attend_tiles_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: DecodeTiles,
    query_start: Tensor,
    scale: float,
    query_len: int,
    num_rows: int,
    out: Tensor,
    counters: Tensor,
    partials: Tensor,
    kv_scales: Tensor | None,
    config: TileConfig | None = None,
) -> KernelCall:
    """The one launch of `attend_tiles`. A step with one length of queries is launched programmatically: then what lists
    the tiles must have been complete when some kernel in between was started (see `triton_decode_fused`)."""
    num_heads, head_size = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    live_pad, width = triton.next_power_of_2(group), triton.next_power_of_2(head_size)
    config = config or tile_config(head_size, q.element_size(), k_cache.element_size())
    require_cells(tiles, k_cache)
    if k_cache.stride() != v_cache.stride():
        raise ValueError(f"keys and values need the same strides, got {k_cache.stride()} and {v_cache.stride()}")
    num_acc = 2 * tiles.num_programs * num_heads * head_size
    args = (
        q, k_cache, v_cache, *tiles[:3], query_start, kv_scales, out, partials, partials[num_acc:], counters,
        scale * _LOG2_E, *q.stride()[:2], *k_cache.stride()[1:3], *out.stride()[:2], num_rows,
    )  # fmt: skip
    pdl = query_len > 0 and starts_early(q.device)
    options = dict(
        GROUP=group, HEAD_SIZE=head_size, HEAD_PAD=width, NUM_QUERIES=max(live_pad, _MIN_QUERIES), LIVE_PAD=live_pad,
        CHUNK=merged_at_a_time(live_pad, width), TILE=tiles.tile,
        UNIT=tile_unit(tiles.tile, block_size), STAGES=config.num_stages,
        SCALED=kv_scales is not None, NATIVE=q.is_cuda, RAGGED=query_len == 0, PDL=pdl, num_warps=config.num_warps,
        launch_pdl=pdl, maxnreg=config.max_registers,
    )  # fmt: skip
    return KernelCall(attend_tiles_kernel, (num_kv_heads, tiles.num_programs), args, options)
