"""Attention over a list of tiles in plain torch: the specification, the CPU path and the kernels' oracle. See `ops`."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ostinato.kernels.decode_tiles import FIRST_TILE, LAST_TILE, VALID_SHIFT, tile_unit
from ostinato.kernels.kv_formats import decode
from ostinato.kernels.reference import rope
from ostinato.kernels.reference_attention import kv_write

__all__ = ["attend_tiles", "plan_tiles", "rope_write"]


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
    unit = tile_unit(tile, block_size)
    capacity = block_table.shape[1] * block_size
    tokens = list(range(num_rows + 1)) if query_len else query_start[: num_rows + 1].tolist()
    count = 0
    for row in range(num_rows):
        starts[row] = count
        if tokens[row + 1] - tokens[row] != 1:
            continue
        length = min(int(seq_lens[row]), capacity)
        num_tiles = max(-(-length // tile), 1)
        for index in range(num_tiles):
            valid = min(max(length - index * tile, 0), tile)
            ends = FIRST_TILE * (index == 0) | LAST_TILE * (index == num_tiles - 1)
            info[count, 0], info[count, 1] = row | valid << VALID_SHIFT | ends, tokens[row]
            for place in range(tile // unit):
                position = index * tile + place * unit
                block = int(block_table[int(row_slot[row]), position // block_size]) if position < length else 0
                cells[count, place] = block * block_cells + position % block_size
            count += 1
    starts[num_rows] = count


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
    """See `ops.attend_tiles`. Programs, counters and workspace only matter to the CUDA kernel."""
    block_size = k_cache.shape[1]
    runs = torch.arange(tile_unit(tile, block_size))
    k_scale, v_scale = (None, None) if kv_scales is None else kv_scales[..., None]  # [G, 1] each
    edges = starts[: num_rows + 1].tolist()
    for begin, end in itertools.pairwise(edges):
        if begin == end:
            continue
        valid = (info[begin:end, 0] >> VALID_SHIFT) % (FIRST_TILE >> VALID_SHIFT)
        exists = torch.arange(tile) < valid[:, None]
        cell = (cells[begin:end, :, None] + runs).flatten(1)[exists].long()
        block_cells = k_cache.stride(0) // k_cache.stride(1)
        at = cell // block_cells, cell % block_cells
        keys, values = decode(k_cache[at], k_scale), decode(v_cache[at], v_scale)  # [L, G, D] float32
        token = int(info[begin, 1])
        group = q.shape[1] // keys.shape[1]
        query = q[token].float().view(keys.shape[1], group, -1) * scale
        scores = torch.einsum("gmd,lgd->gml", query, keys)
        attended = torch.einsum("gml,lgd->gmd", torch.softmax(scores, -1), values)
        out[token] = attended.reshape(out.shape[1:])


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
    """See `ops.rope_write`."""
    k = k.clone()
    rope(q, k, positions, cos_sin, q_norm, k_norm, eps)
    kv_write(k, v, k_cache, v_cache, slot_mapping, kv_scales)
