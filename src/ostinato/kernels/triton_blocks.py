"""The CUDA implementation of the `copy_blocks` op.

It reads or writes pinned host memory itself: one launch moves any number of blocks, where a copy command for each would
cost more time to issue than to carry out. Few programs, because they run beside a step and wait for the bus.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["copy_blocks", "copy_blocks_kernel"]

_CHUNK = 2048  # words of 8 bytes that a program has on its way at once
_MAX_PROGRAMS = 16


@triton.jit(
    do_not_specialize=["first_layer", "num_pieces", "num_run"],
    do_not_specialize_on_alignment=["source_ids", "target_ids"],
)
def copy_blocks_kernel(
    source,
    target,
    source_ids,
    target_ids,
    first_layer,
    num_pieces,
    num_run,
    NUM_LAYERS: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (P,): program p copies pieces p, p + P, ...; a piece is one of `num_run` layers of one block, WORDS words.
    One kernel for a pool, whichever layers and however many blocks, so that none is compiled or loaded for a step."""
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        block = piece // num_run
        layer = first_layer + piece % num_run
        read = (tl.load(source_ids + block).to(tl.int64) * NUM_LAYERS + layer) * WORDS
        write = (tl.load(target_ids + block).to(tl.int64) * NUM_LAYERS + layer) * WORDS
        for begin in range(0, WORDS, CHUNK):
            words = begin + tl.arange(0, CHUNK)
            inside = words < WORDS
            tl.store(target + write + words, tl.load(source + read + words, mask=inside), mask=inside)


def copy_blocks(
    source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor, first_layer: int, num_layers: int
) -> None:
    """As `reference_blocks.copy_blocks`, for contiguous tensors of which the host's is pinned."""
    num_pieces = source_ids.numel() * num_layers
    words = source.shape[2] // 8
    copy_blocks_kernel[(min(num_pieces, _MAX_PROGRAMS),)](
        source.view(torch.int64), target.view(torch.int64), source_ids, target_ids, first_layer, num_pieces,
        num_layers, NUM_LAYERS=source.shape[1], WORDS=words, CHUNK=min(_CHUNK, triton.next_power_of_2(words)),
        num_warps=8,
    )  # fmt: skip
