"""The inner step that both attention kernels share: a block of queries against one tile of paged keys and values.

The softmax is the online one (Milakov and Gimelshein, 2018; FlashAttention-2, Dao 2023): running maximum `peak`, sum
`total` and unnormalised output `acc`, all float32, with scores in base 2 so that `exp2` serves.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attend_tile", "normalise"]


@triton.jit
def attend_tile(
    q,  # [M, HEAD_PAD]
    acc,  # [M, HEAD_PAD] float32
    peak,  # [M] float32
    total,  # [M] float32
    k_head,  # pointer to the kv head's first element in block 0
    v_head,
    table,  # pointer to the row's block table
    first,  # first position of the tile
    kv_len,  # positions of the row that exist
    visible,  # [M]: each query sees positions below this
    scale,  # softmax scale times log2(e)
    k_stride_block,
    k_stride_cell,
    v_stride_block,
    v_stride_cell,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Folds positions [first, first + TILE) into (acc, peak, total). Keys and values are used as stored, in the type of
    `q`: where the cache has scales, they are the caller's to put into `scale` and the output.

    MASKED false promises that every query sees the whole tile. Otherwise positions from `kv_len` on are not loaded,
    neither table entries nor keys nor values: 0 * NaN would be NaN, so masking the scores alone is not enough.
    """
    positions = first + tl.arange(0, TILE)
    dims = tl.arange(0, HEAD_PAD)
    if MASKED:
        exists = positions < kv_len
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    else:
        blocks = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
    cells = positions % BLOCK_SIZE
    k_tile = k_head + (blocks * k_stride_block + cells * k_stride_cell)[:, None] + dims[None, :]
    v_tile = v_head + (blocks * v_stride_block + cells * v_stride_cell)[:, None] + dims[None, :]
    if MASKED:
        readable = exists[:, None] & (dims < HEAD_SIZE)[None, :]
        keys = tl.load(k_tile, mask=readable, other=0.0)
        values = tl.load(v_tile, mask=readable, other=0.0)
    elif HEAD_SIZE == HEAD_PAD:
        keys = tl.load(k_tile)
        values = tl.load(v_tile)
    else:
        readable = (dims < HEAD_SIZE)[None, :]
        keys = tl.load(k_tile, mask=readable, other=0.0)
        values = tl.load(v_tile, mask=readable, other=0.0)

    keys, values = keys.to(q.dtype), values.to(q.dtype)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(positions[None, :] < visible[:, None], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A query that has seen nothing yet has peak -inf, and -inf - -inf is NaN.
    origin = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    weights = tl.exp2(scores - origin[:, None])
    decay = tl.exp2(peak - origin)
    new_total = total * decay + tl.sum(weights, 1)
    new_acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return new_acc, new_peak, new_total


@triton.jit
def normalise(acc, total):
    """acc / total per query; a query that saw nothing (total 0, acc 0) gets zeros."""
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]
