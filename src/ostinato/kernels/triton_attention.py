"""The CUDA implementation of the `attention` op, and the attention of a step as launches to be repeated.

Short queries of one length have a kernel. A ragged step has two: rows of one token, which are the running requests
beside a prompt, can go through the decode kernel over tiles, since in a query block of the ragged one they would fill
one place of many. Which rows those are is found on the device, so that a recording holds for any mix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ostinato.kernels.triton_attention_decode import MAX_QUERY_LEN, decode_attention
from ostinato.kernels.triton_attention_prefill import prefill_call
from ostinato.kernels.triton_launch import KernelCall, PreparedCall

__all__ = ["attention", "prepared_around", "prepared_decode", "prepared_ragged"]


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
    """As `reference_attention.attention`. The grid follows from the arguments' shapes and the ints alone."""
    if 0 < query_len <= MAX_QUERY_LEN:
        decode_attention(
            q, k_cache, v_cache, block_table, row_slot, seq_lens, scale, query_len, num_rows, num_splits, out, kv_scales
        )
        return
    prefill_call(
        q, k_cache, v_cache, block_table, row_slot, query_start, seq_lens, scale, num_rows, out, kv_scales,
        singles=singles,
    )()  # fmt: skip


def prepared_decode(*calls: KernelCall, device: torch.device) -> Callable[[], None]:
    """The calls of a step with one token in each row as a function that launches them on the current stream."""
    if not all(call.can_be_prepared for call in calls):
        return _in_turn(*calls)
    prepared, current = [PreparedCall(call) for call in calls], _stream_of(device)

    def run() -> None:
        stream = current()
        for call in prepared:
            call.launch(stream, *call.grid)

    return run


def prepared_ragged(
    write: KernelCall, prefill: KernelCall, singles: KernelCall, device: torch.device, live_rows: Callable[[], int]
) -> Callable[[], None]:
    """Calls that write a step's keys and values, and attend for its rows of several tokens and for those of one, as a
    function that launches them on the current stream, over the first `live_rows()` rows: no other has a token."""
    if not write.can_be_prepared:
        return _in_turn(write, prefill, singles)
    first, second, third = PreparedCall(write), PreparedCall(prefill), PreparedCall(singles)
    current, rows_at = _stream_of(device), second.place("num_rows")
    query_blocks, num_kv_heads = second.grid[0] - second.get(rows_at), second.grid[1]

    def run() -> None:
        stream, rows = current(), live_rows()
        first.launch(stream, *first.grid)
        second.put(rows_at, rows)
        second.launch(stream, query_blocks + rows, num_kv_heads, 1)
        third.launch(stream, *third.grid)

    return run


def prepared_around(
    write: KernelCall, attend: Callable[[], None], singles: KernelCall, device: torch.device
) -> Callable[[], None]:
    """As `prepared_ragged`, with the attention of the rows of several tokens by a function that launches it itself."""
    if not write.can_be_prepared:
        return _in_turn(write, attend, singles)
    first, last, current = PreparedCall(write), PreparedCall(singles), _stream_of(device)

    def run() -> None:
        stream = current()
        first.launch(stream, *first.grid)
        attend()
        last.launch(stream, *last.grid)

    return run


def _in_turn(*calls: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def _stream_of(device: torch.device) -> Callable[[], int]:
    """A function that returns the raw handle of the current stream there."""
    index = torch.cuda.current_device() if device.index is None else device.index
    raw = torch._C._cuda_getCurrentRawStream

    def current() -> int:
        return int(raw(index))

    return current
