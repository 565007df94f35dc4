"""The CUDA implementation of the `gather_blocks` op: each row's blocks, copied to where they lie one behind the other.

Some programs serve one row: each takes every so many-th of its blocks, up to the length that it reads on the device.
How many they are follows from the shapes, enough to fill the device where there are few rows.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels.triton_launch import early, num_multiprocessors, start

__all__ = ["gather_blocks", "gather_blocks_kernel", "gather_chunk"]

_PROGRAMS_PER_SM = 8
_CHUNK_BYTES = 8192  # of keys, and as many of values, that a program has on their way at once
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit(do_not_specialize=["table_width"])
def gather_blocks_kernel(
    k_cache,
    v_cache,
    block_table,
    row_slot,
    seq_lens,
    keys,
    values,
    table_width,
    table_stride,
    k_cache_stride_block,
    v_cache_stride_block,
    keys_stride_block,
    values_stride_block,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (P, R): program p of a row copies its blocks p, p + P, ..., SIZE elements of keys and of values each."""
    start(PDL)
    row = tl.program_id(1).to(tl.int64)
    num_blocks = tl.minimum(tl.cdiv(tl.load(seq_lens + row), BLOCK_SIZE), table_width)
    table = block_table + tl.load(row_slot + row).to(tl.int64) * table_stride
    for index in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        block = tl.load(table + index).to(tl.int64)
        place = row * table_width + index
        for begin in range(0, SIZE, CHUNK):
            cells = begin + tl.arange(0, CHUNK)
            inside = cells < SIZE
            some_keys = tl.load(k_cache + block * k_cache_stride_block + cells, mask=inside)
            some_values = tl.load(v_cache + block * v_cache_stride_block + cells, mask=inside)
            tl.store(keys + place * keys_stride_block + cells, some_keys, mask=inside)
            tl.store(values + place * values_stride_block + cells, some_values, mask=inside)


def gather_chunk(size: int, element_size: int) -> int:
    """Elements that a program copies at once, of blocks of `size`."""
    return min(int(triton.next_power_of_2(size)), _CHUNK_BYTES // element_size)


def gather_blocks(
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    seq_lens: Tensor,
    num_rows: int,
    keys: Tensor,
    values: Tensor,
) -> None:
    """As `reference_blocks.gather_blocks`, for tensors whose blocks are contiguous. Copies bits, whatever the type."""
    width, size = block_table.shape[1], k_cache[0].numel()
    wanted = triton.cdiv(_PROGRAMS_PER_SM * num_multiprocessors(k_cache.device), num_rows)
    bits = [tensor.view(_BITS[tensor.element_size()]) for tensor in (k_cache, v_cache, keys, values)]
    gather_blocks_kernel[(min(width, wanted), num_rows)](
        bits[0], bits[1], block_table, row_slot, seq_lens, bits[2], bits[3],
        width, block_table.stride(0), *(tensor.stride(0) for tensor in bits),
        BLOCK_SIZE=k_cache.shape[1], SIZE=size, CHUNK=gather_chunk(size, k_cache.element_size()),
        num_warps=4, **early(k_cache.device),
    )  # fmt: skip
