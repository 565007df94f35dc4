"""The ops that read or write the paged cache within a step. Part of `ops`, which is what others import.

The legend is there.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ostinato.kernels.decode_tiles import DecodeTiles, require_cells
from ostinato.kernels.flash_attention import FlashRows
from ostinato.kernels.op_library import Op, no_output, register

__all__ = [
    "attend_tiles",
    "attention",
    "decode_attention",
    "flash_attention",
    "invariant_attention",
    "kv_write",
    "plan_flash",
    "plan_tiles",
    "rope_write",
]


_OPS: Final = (
    Op(
        "kv_write",
        "reference_attention",
        "triton_kv_write",
        "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
        "Tensor? kv_scales=None) -> ()",
        no_output,
    ),
    Op(
        "attention",
        "reference_attention",
        "triton_attention",
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor row_slot, Tensor query_start, "
        "Tensor seq_lens, float scale, int query_len, int num_rows, int num_splits, Tensor(a!) out, "
        "Tensor? kv_scales=None, bool singles=True) -> ()",
        no_output,
    ),
    Op(
        "plan_tiles",
        "reference_tiles",
        "triton_decode_tiles",
        "(Tensor seq_lens, Tensor query_start, Tensor block_table, Tensor row_slot, int query_len, int num_rows, "
        "int block_size, int block_cells, int tile, Tensor(a!) starts, Tensor(b!) info, Tensor(c!) cells) -> ()",
        no_output,
    ),
    Op(
        "attend_tiles",
        "reference_tiles",
        "triton_decode_tiles",
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor starts, Tensor info, Tensor cells, Tensor query_start, "
        "float scale, int query_len, int num_rows, int tile, int num_programs, Tensor(a!) out, Tensor(b!) counters, "
        "Tensor(c!) partials, Tensor? kv_scales=None) -> ()",
        no_output,
    ),
    Op(
        "plan_flash",
        "reference_flash",
        "triton_flash_rows",
        "(Tensor seq_lens, Tensor query_start, Tensor block_table, Tensor row_slot, int num_rows, int num_tokens, "
        "int block_size, bool singles, Tensor(a!) page_table, Tensor(b!) edges, Tensor(c!) queries, Tensor(d!) keys) "
        "-> ()",
        no_output,
    ),
    Op(
        "flash_attention",
        "reference_flash",
        "flash_attention",
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor edges, Tensor queries, Tensor keys, "
        "float scale, Tensor(a!) out) -> ()",
        no_output,
    ),
    Op(
        "rope_write",
        "reference_tiles",
        "triton_rope_write",
        "(Tensor(a!) q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, "
        "float eps, Tensor slot_mapping, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor? kv_scales=None) -> ()",
        no_output,
    ),
    Op(
        "decode_attention",
        "reference_attention",
        "triton_decode_fused",
        "(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, float eps, "
        "Tensor slot_mapping, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor block_table, Tensor row_slot, "
        "Tensor seq_lens, float scale, int num_rows, int num_splits, Tensor(c!) out, Tensor(d!) counters, "
        "bool pdl=False, Tensor? kv_scales=None, Tensor(e!)? partials=None) -> ()",
        no_output,
    ),
    Op(
        "invariant_attention",
        "reference_invariant",
        "triton_invariant",
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor row_slot, Tensor query_start, "
        "Tensor seq_lens, float scale, int num_rows, Tensor(a!) out, Tensor? kv_scales=None) -> ()",
        no_output,
    ),
)

register(_OPS)

_kv_write: Final = torch.ops.ostinato.kv_write.default
_attention: Final = torch.ops.ostinato.attention.default
_plan_tiles: Final = torch.ops.ostinato.plan_tiles.default
_attend_tiles: Final = torch.ops.ostinato.attend_tiles.default
_plan_flash: Final = torch.ops.ostinato.plan_flash.default
_flash_attention: Final = torch.ops.ostinato.flash_attention.default
_rope_write: Final = torch.ops.ostinato.rope_write.default
_decode_attention: Final = torch.ops.ostinato.decode_attention.default
_invariant_attention: Final = torch.ops.ostinato.invariant_attention.default


def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None = None
) -> None:
    """Writes a step's keys and values into the paged cache.

    `k [T, G, D]`, `v [T, G, D]`, `k_cache! [N, B, G, D]`, `v_cache! [N, B, G, D]` (strided views), `slot_mapping
    [>=T]`: token t goes to block `slot // B`, place `slot % B`; a negative slot writes nothing.
    `kv_scales [2, G]` float32, of keys and values: x is stored as x / scale (see `kv_formats`); None: as it is.
    """
    _kv_write(k, v, k_cache, v_cache, slot_mapping, kv_scales)


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
    """Causal attention of a step's queries over the paged cache, which already holds the step's own keys.

    `q [T, H, D]`, `k_cache [N, B, G, D]`, `v_cache [N, B, G, D]`, `block_table [S, W]`, `row_slot [>=num_rows]`,
    `query_start [>=num_rows + 1]`, `seq_lens [>=num_rows]`, `out! [T, H, D]`. Token j of a row with q tokens sees the
    positions below `seq_len - q + j + 1`; padding gives zeros. Nothing outside a row's live positions is used, NaN
    included. `query_len` 0: as `query_start` says, which on CUDA is read for long queries of one length too.
    `num_splits` (short queries of one length, CUDA only) is how many programs share one row's keys. `kv_scales`: as
    they were written with (see `kv_write`). `singles` false (a ragged step): rows of one token are left to
    `attend_tiles`, to be called next.
    """
    _attention(
        q,
        k_cache,
        v_cache,
        block_table,
        row_slot,
        query_start,
        seq_lens,
        scale,
        query_len,
        num_rows,
        num_splits,
        out,
        kv_scales,
        singles,
    )


def plan_tiles(
    seq_lens: Tensor,
    query_start: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    query_len: int,
    num_rows: int,
    block_size: int,
    tiles: DecodeTiles,
) -> None:
    """Lists the tiles of the rows of one token, each row's behind the ones of the row before.

    `seq_lens [>=num_rows]`, `query_start [>=num_rows + 1]`, `block_table [S, W]`, `row_slot [>=num_rows]`; of `tiles!`
    `starts [>=num_rows + 1]`, `info [N, 2]`, `cells [N, U]`, with room for all tiles of all rows at full length. With
    `query_len` 0 rows of other than one token have no tile; with 1 each row has at least one, even without positions.
    What lies behind the last tile stays.
    """
    _plan_tiles(
        seq_lens,
        query_start,
        block_table,
        row_slot,
        query_len,
        num_rows,
        block_size,
        tiles.block_cells,
        tiles.tile,
        tiles.starts,
        tiles.info,
        tiles.cells,
    )


def attend_tiles(
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
    kv_scales: Tensor | None = None,
) -> None:
    """`attention` of the rows that `plan_tiles` listed; tokens of no such row stay as they are. Raises ValueError for a
    list that is for a cache of other strides.

    `q [T, H, D]`, `k_cache [N, B, G, D]` and `v_cache [N, B, G, D]` of the same strides, `query_start
    [>=num_rows + 1]`, `query_len` and `num_rows` as for `plan_tiles`, `out! [T, H, D]`, `counters! [>=num_rows * G]`
    int32, zero before the first call and after each, `partials!` float32 `[>=2 * num_programs * H * (D + 1)]`:
    workspace. Calls of one stream may share both.
    """
    require_cells(tiles, k_cache)
    _attend_tiles(
        q,
        k_cache,
        v_cache,
        tiles.starts,
        tiles.info,
        tiles.cells,
        query_start,
        scale,
        query_len,
        num_rows,
        tiles.tile,
        tiles.num_programs,
        out,
        counters,
        partials,
        kv_scales,
    )


def plan_flash(
    seq_lens: Tensor,
    query_start: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    num_rows: int,
    num_tokens: int,
    block_size: int,
    rows: FlashRows,
    singles: bool = True,
) -> None:
    """Writes down a ragged step's rows for `flash_attention`, and the tokens behind them as one more row without keys.

    `seq_lens [>=num_rows]`, `query_start [>=num_rows + 1]`, `block_table [S, W]`, `row_slot [>=num_rows]`,
    `num_tokens`: T of the step. Of `rows!` `page_table [>=num_rows + 1, W]`, in which what lies behind a row's last
    block stays, `edges [>=num_rows + 2]`, `queries` and `keys [>=num_rows + 1]`. `singles` false: rows of one token
    have no queries. A row longer than its table counts as one that fills it.
    """
    _plan_flash(seq_lens, query_start, block_table, row_slot, num_rows, num_tokens, block_size, singles, *rows)


def flash_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: FlashRows, scale: float, out: Tensor) -> None:
    """`attention` of the rows that `plan_flash` wrote down; tokens of rows without queries stay as they are. On CUDA
    by FlashAttention-3, where `flash_attention.missing` and `unsupported` have nothing to say against it.

    `q [T, H, D]`, `k_cache [N, B, G, D]`, `v_cache [N, B, G, D]`, `out! [T, H, D]`, all of one dtype; `rows` of exactly
    the step's R + 1 rows.
    """
    _flash_attention(q, k_cache, v_cache, *rows, scale, out)


def rope_write(
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
    kv_scales: Tensor | None = None,
) -> None:
    """`rope` and `kv_write` in one: `q! [T, H, D]` is turned in place, `k [T, G, D]` stays and goes to the cache
    turned, `v [T, G, D]` as it is. The rest as there."""
    _rope_write(q, k, v, positions, cos_sin, q_norm, k_norm, eps, slot_mapping, k_cache, v_cache, kv_scales)


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
    """`rope`, `kv_write` and `attention` of a step with one token a row in one: takes raw q, k, v and keeps them.

    `q [R, H, D]`, `k [R, G, D]`, `v [R, G, D]`, `k_cache! [N, B, G, D]`, `v_cache! [N, B, G, D]`, `out! [R, H, D]`,
    `counters! [>=num_rows * G]` int32; the rest as there. A row's token is its last position; its slot, if it has one,
    is the cell which the table gives for that, as `prepare` leaves it, and is not read back from the cache. `counters`
    must be zero before the first call, is zero again after each, and may be shared by calls of one stream.

    `partials!` float32 `[>=num_rows * num_splits * H * (D + 1)]`: workspace, which calls of one stream may share;
    without it the op makes its own (CUDA only).

    `pdl` launches programmatically where the device can (compute capability 9.0 on). Whatever wrote the integers, the
    tables and the cache's older cells must then have been complete when some kernel in between was started.
    """
    _decode_attention(
        q,
        k,
        v,
        positions,
        cos_sin,
        q_norm,
        k_norm,
        eps,
        slot_mapping,
        k_cache,
        v_cache,
        block_table,
        row_slot,
        seq_lens,
        scale,
        num_rows,
        num_splits,
        out,
        counters,
        pdl,
        kv_scales,
        partials,
    )


def invariant_attention(
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
    kv_scales: Tensor | None = None,
) -> None:
    """`attention` with `query_len` 0, where a token's output has the same bits however its prompt was cut into steps
    and whatever stands beside it: they follow from its query and from the keys and values up to its own position.
    """
    _invariant_attention(
        q, k_cache, v_cache, block_table, row_slot, query_start, seq_lens, scale, num_rows, out, kv_scales
    )
