"""The CUDA implementation of the `plan_flash` op: a step's rows as FlashAttention-3 takes them.

Tables lie in the state by state row and FlashAttention reads them by row of the step, so they are copied, once a step
for all layers, as far as each row has positions.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["PLAN_FLASH_CHUNK", "plan_flash", "plan_flash_kernel"]

PLAN_FLASH_CHUNK = 512
"""Blocks that a program copies at a time."""


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "table_width"])
def plan_flash_kernel(
    seq_lens,
    query_start,
    block_table,
    row_slot,
    page_table,
    edges,
    queries,
    keys,
    num_rows,
    num_tokens,
    table_width,
    table_stride,
    page_table_stride,
    BLOCK_SIZE: tl.constexpr,
    SINGLES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (R + 1,): one row each, the last one of the tokens behind the others."""
    row = tl.program_id(0)
    is_row = row < num_rows
    start = tl.minimum(tl.load(query_start + row), num_tokens)
    end = tl.minimum(tl.load(query_start + row + 1, mask=is_row, other=num_tokens), num_tokens)
    count = end - start
    if not SINGLES:
        count = tl.where(is_row & (count == 1), 0, count)
    length = tl.minimum(tl.load(seq_lens + row, mask=is_row, other=0), table_width * BLOCK_SIZE)
    length = tl.where(count > 0, length, 0)
    tl.store(edges + row, start)
    tl.store(queries + row, count)
    tl.store(keys + row, length)
    if row == num_rows:
        tl.store(edges + num_rows + 1, num_tokens)
    source = block_table + tl.load(row_slot + row, mask=is_row, other=0).to(tl.int64) * table_stride
    target = page_table + row.to(tl.int64) * page_table_stride
    num_blocks = tl.cdiv(length, BLOCK_SIZE)
    for first in range(0, num_blocks, CHUNK):
        column = first + tl.arange(0, CHUNK)
        inside = column < num_blocks
        tl.store(target + column, tl.load(source + column, mask=inside, other=0), mask=inside)


def plan_flash(
    seq_lens: Tensor,
    query_start: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    num_rows: int,
    num_tokens: int,
    block_size: int,
    singles: bool,
    page_table: Tensor,
    edges: Tensor,
    queries: Tensor,
    keys: Tensor,
) -> None:
    """As `reference_flash.plan_flash`."""
    plan_flash_kernel[(num_rows + 1,)](
        seq_lens, query_start, block_table, row_slot, page_table, edges, queries, keys,
        num_rows, num_tokens, block_table.shape[1], block_table.stride(0), page_table.stride(0),
        BLOCK_SIZE=block_size, SINGLES=singles, CHUNK=PLAN_FLASH_CHUNK, num_warps=4,
    )  # fmt: skip
