"""The CUDA implementation of the `attention` op, and the attention of a step as launches to be repeated.

Short queries of one length have a kernel. A ragged step has two: rows of one token, which are the running requests
beside a prompt, go through the decode kernel, since in a query block of the ragged one they would fill one place of
many. Which rows those are is found on the device, so that a recording holds for any mix. Without a list of parts all
rows go through the ragged kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ostinato.kernels.triton_attention_decode import MAX_QUERY_LEN, decode_attention
from ostinato.kernels.triton_attention_prefill import prefill_call
from ostinato.kernels.triton_decode_fused import single_token_call
from ostinato.kernels.triton_launch import KernelCall, PreparedCall

__all__ = ["attention", "prepared_decode", "prepared_ragged"]


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
    counters: Tensor | None = None,
    parts: Tensor | None = None,
    partials: Tensor | None = None,
) -> None:
    """As `reference_attention.attention`. The grid follows from the arguments' shapes and the ints alone."""
    if 0 < query_len <= MAX_QUERY_LEN:
        decode_attention(
            q, k_cache, v_cache, block_table, row_slot, seq_lens, scale, query_len, num_rows, num_splits, out, kv_scales
        )
        return
    over = (q, k_cache, v_cache, block_table, row_slot, query_start, seq_lens, scale, num_rows, out)
    if parts is not None:
        assert counters is not None and partials is not None
        single_token_call(*over, counters, parts, partials, kv_scales)()
    prefill_call(*over, kv_scales, singles=parts is None)()


def prepared_decode(decode: KernelCall, device: torch.device) -> Callable[[], None]:
    """A call of `ops.decode_attention`, one token in each row, as a function that launches it on the current stream."""
    if not decode.can_be_prepared:
        return decode
    prepared, current = PreparedCall(decode), _stream_of(device)

    def run() -> None:
        prepared.launch(current(), *prepared.grid)

    return run


def prepared_ragged(
    write: KernelCall, singles: KernelCall, prefill: KernelCall, device: torch.device, live_rows: Callable[[], int]
) -> Callable[[], None]:
    """Calls that write a step's keys and values, and attend for its rows of one token and for the others, as a function
    that launches them on the current stream, over the first `live_rows()` rows: no other has a token."""
    if not write.can_be_prepared:
        return _in_turn(write, singles, prefill)
    first, second, third = PreparedCall(write), PreparedCall(singles), PreparedCall(prefill)
    current, rows_at = _stream_of(device), third.place("num_rows")
    num_kv_heads, num_rows = second.grid[0], third.get(rows_at)
    more_parts, query_blocks = second.grid[1] - num_rows, third.grid[0] - num_rows

    def run() -> None:
        stream, rows = current(), live_rows()
        first.launch(stream, *first.grid)
        second.launch(stream, num_kv_heads, rows + more_parts, 1)
        third.put(rows_at, rows)
        third.launch(stream, query_blocks + rows, num_kv_heads, 1)

    return run


def _in_turn(*calls: KernelCall) -> Callable[[], None]:
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
