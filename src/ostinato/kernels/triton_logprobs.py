"""The CUDA implementation of the `logprobs` op: top-n per chunk of the vocabulary, then of the chunks' winners."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels.triton_launch import early, start
from ostinato.kernels.triton_logits import CHUNK, NO_ID, load_logits

__all__ = ["logprobs", "logprobs_chunk_kernel", "logprobs_merge_kernel"]

_COLUMNS = tl.constexpr(22)  # sampled, log-sum-exp or rank, and 20 alternatives


@triton.jit
def _take_largest(values, ids, left):
    """The largest of the values that are left, its lowest id (NO_ID if none is left), and what is left then."""
    value = tl.max(tl.where(left, values, -float("inf")))
    token = tl.min(tl.where(left & (values == value), ids, NO_ID))
    return value, token, left & (ids != token)


@triton.jit
def logprobs_chunk_kernel(
    logits, row_slot, num_logprobs, sampled, chunk_values, chunk_ids, scratch, num_vocab, logits_stride,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (R, V / CHUNK). Per chunk, [22] values: largest logit, sum of exponentials relative to it, top values;
    [22] ids: how many logits exceed the sampled one, -, top ids."""
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slot + row)
    count = tl.load(num_logprobs + slot)
    if (slot == scratch) | (count < 0):
        return
    logits += row * logits_stride
    place = (row * tl.num_programs(1) + tl.program_id(1)) * _COLUMNS
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    values = load_logits(logits, logits, 0, ids, ids < num_vocab)
    token = tl.load(sampled + row)
    chosen = load_logits(logits, logits, 0, token, True)
    largest = tl.max(values)
    exponentials = tl.where(values > -float("inf"), tl.exp(values - largest), 0.0)
    tl.store(chunk_values + place, largest)
    tl.store(chunk_values + place + 1, tl.sum(exponentials))
    tl.store(chunk_ids + place, tl.sum((values > chosen).to(tl.int32)))
    left = ids < num_vocab
    for i in range(count):
        value, best, left = _take_largest(values, ids, left)
        tl.store(chunk_values + place + 2 + i, value)
        tl.store(chunk_ids + place + 2 + i, best)


@triton.jit
def logprobs_merge_kernel(
    logits,
    row_slot,
    num_logprobs,
    sampled,
    chunk_values,
    chunk_ids,
    out_values,
    out_ids,
    scratch,
    num_chunks,
    logits_stride,
    out_values_stride,
    out_ids_stride,
    CHUNKS_PAD: tl.constexpr,
    TOP_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R,). TOP_PAD: at least 22 candidates for each chunk."""
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slot + row)
    count = tl.load(num_logprobs + slot)
    if (slot == scratch) | (count < 0):
        return
    chunk_values += row * num_chunks * _COLUMNS
    chunk_ids += row * num_chunks * _COLUMNS
    out_values += row * out_values_stride
    out_ids += row * out_ids_stride
    chunk = tl.arange(0, CHUNKS_PAD)
    is_chunk = chunk < num_chunks
    tops = tl.load(chunk_values + chunk * _COLUMNS, mask=is_chunk, other=-float("inf"))
    sums = tl.load(chunk_values + chunk * _COLUMNS + 1, mask=is_chunk, other=0.0)
    larger = tl.sum(tl.load(chunk_ids + chunk * _COLUMNS, mask=is_chunk, other=0))
    largest = tl.max(tops)
    total = largest + tl.log(tl.sum(tl.where(tops > -float("inf"), sums * tl.exp(tops - largest), 0.0)))
    shift = tl.where(total > -float("inf"), total, 0.0)  # without any finite logit all stay -inf
    token = tl.load(sampled + row)
    tl.store(out_values, load_logits(logits + row * logits_stride, logits, 0, token, True) - shift)
    tl.store(out_values + 1, total)
    tl.store(out_ids, token)
    tl.store(out_ids + 1, larger + 1)

    place = tl.arange(0, TOP_PAD)
    candidate = (place < num_chunks * _COLUMNS) & (place % _COLUMNS >= 2) & (place % _COLUMNS < 2 + count)
    values = tl.load(chunk_values + place, mask=candidate, other=-float("inf"))
    ids = tl.load(chunk_ids + place, mask=candidate, other=NO_ID)
    left = ids != NO_ID
    for i in range(_COLUMNS - 2):
        value, best, left = _take_largest(values, ids, left & (i < count))
        found = best != NO_ID
        tl.store(out_values + 2 + i, tl.where(found, value - shift, -float("inf")))
        tl.store(out_ids + 2 + i, tl.where(found, best, -1))


def logprobs(
    logits: Tensor, row_slot: Tensor, num_logprobs: Tensor, sampled: Tensor, out_values: Tensor, out_ids: Tensor
) -> None:
    """See `ops.logprobs`."""
    num_rows, num_vocab = logits.shape
    if num_rows == 0:
        return
    num_chunks, scratch = triton.cdiv(num_vocab, CHUNK.value), num_logprobs.shape[0] - 1
    shape = (num_rows, num_chunks, _COLUMNS.value)
    chunk_values = torch.empty(shape, dtype=torch.float32, device=logits.device)
    chunk_ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    logprobs_chunk_kernel[(num_rows, num_chunks)](
        logits, row_slot, num_logprobs, sampled, chunk_values, chunk_ids, scratch, num_vocab, logits.stride(0),
        num_warps=8, **early(logits.device),
    )  # fmt: skip
    logprobs_merge_kernel[(num_rows,)](
        logits, row_slot, num_logprobs, sampled, chunk_values, chunk_ids, out_values, out_ids,
        scratch, num_chunks, logits.stride(0), out_values.stride(0), out_ids.stride(0),
        CHUNKS_PAD=triton.next_power_of_2(num_chunks),
        TOP_PAD=triton.next_power_of_2(num_chunks * _COLUMNS.value), num_warps=8, **early(logits.device),
    )  # fmt: skip
