"""The CUDA implementation of the `sample` op; the algorithm is spelled out in `reference_sampling`.

Two kernels. `chunk_kernel`, one program per row and chunk of the vocabulary, adjusts the logits of rows that ask for
it and finds the best token of the chunk: the largest logit, or for a row that draws without filters the largest
logit + noise. `pick_kernel`, one program per row, picks the best chunk; for a row with filters it then finds the least
logit to keep and draws. A row takes the branches of its own parameters, so a batch of greedy rows costs one pass over
the logits whatever else the sampler can do, and nothing depends on what the host knows.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels import reference_sampling as spec
from ostinato.kernels.triton_launch import early, start
from ostinato.kernels.triton_logits import (
    CHUNK,
    LANE,
    MIN_TEMPERATURE,
    NO_ID,
    first_largest,
    has_filters,
    load_logits,
    needs_logits,
    noise_tile,
)
from ostinato.kernels.triton_sampling_filters import FILTER_NUM_WARPS, least_reaching, weigh

__all__ = ["FP_FUSION", "chunk_kernel", "pick_kernel", "sample"]

CHUNK_NUM_WARPS = 2
FP_FUSION = False
"""A product and the sum behind it rounded once or twice is the compiler's choice, kernel by kernel. Twice in all that
find a best value: a row's token is then the same by chunks of stored logits and by the head's tiles."""
_PENALTIES = tl.constexpr(spec.FLAG_PENALTIES)
_LOGIT_BIAS = tl.constexpr(spec.FLAG_LOGIT_BIAS)
_MIN_LENGTH = tl.constexpr(spec.FLAG_MIN_LENGTH)
_ALLOWED = tl.constexpr(spec.FLAG_ALLOWED)
# exp(-40) is less than float32 sees beside 1: tokens further down have no share, and the noise cannot lift them.
_NO_SHARE = tl.constexpr(40.0)


@triton.jit
def _penalise(value, ids, inside, changes, repetition, frequency, presence, counts, in_prompt):
    asked = inside & ((changes & _PENALTIES) != 0)
    count = tl.load(counts + ids, mask=asked, other=0)
    seen = (count > 0) | (tl.load(in_prompt + ids, mask=asked, other=0) != 0)
    repeated = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    value = tl.where(seen, repeated, value)
    return value - tl.where(count > 0, frequency * count.to(tl.float32) + presence, 0.0)


@triton.jit
def chunk_kernel(
    logits,
    row_slot,
    temperature,
    top_p,
    min_p,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    top_k,
    seed_lo,
    seed_hi,
    min_length,
    num_tokens,
    stop_ids,
    bias_ids,
    bias_values,
    output_counts,
    in_prompt,
    allowed,
    flags,
    adjusted,
    best_values,
    best_ids,
    scratch,
    num_vocab,
    logits_stride,
    adjusted_stride,
    counts_stride,
    in_prompt_stride,
    allowed_stride,
    num_stop_ids,
    num_biases,
    STOP_PAD: tl.constexpr,
    BIAS_PAD: tl.constexpr,
    TILED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R, V / CHUNK). Leaves the chunk's best value and token; for a row with filters the best tempered logit.
    TILED: rows that do not need their logits have none, and are left alone."""
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    slot = tl.load(row_slot + row).to(tl.int64)
    if slot == scratch:
        return
    if TILED and not needs_logits(flags, temperature, top_k, top_p, min_p, slot, num_vocab):
        return
    logits += row * logits_stride
    adjusted += row * adjusted_stride
    first = chunk * CHUNK
    ids = first + tl.arange(0, 4)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    inside = ids < num_vocab
    changes = tl.load(flags + slot)
    known = tl.load(num_tokens + slot)

    if changes != 0:
        # The chunk first, then the few tokens with a bias again from the start, then the bans: each overwrites.
        repetition = tl.load(repetition_penalty + slot)
        frequency = tl.load(frequency_penalty + slot)
        presence = tl.load(presence_penalty + slot)
        counts = output_counts + slot * counts_stride
        prompt = in_prompt + slot * in_prompt_stride
        value = tl.load(logits + ids, mask=inside, other=0.0).to(tl.float32)
        value = _penalise(value, ids, inside, changes, repetition, frequency, presence, counts, prompt)
        tl.store(adjusted + ids, value, mask=inside)
        if (changes & _LOGIT_BIAS) != 0:
            tl.debug_barrier()
            column = tl.arange(0, BIAS_PAD)
            biased = tl.load(bias_ids + slot * num_biases + column, mask=column < num_biases, other=-1)
            bias = tl.load(bias_values + slot * num_biases + column, mask=column < num_biases, other=0.0)
            here = (biased >= first) & (biased < first + CHUNK) & (biased < num_vocab)
            bias += tl.load(logits + biased, mask=here, other=0.0).to(tl.float32)
            bias = _penalise(bias, biased, here, changes, repetition, frequency, presence, counts, prompt)
            tl.store(adjusted + biased, bias, mask=here)
        if (changes & _MIN_LENGTH) != 0:
            tl.debug_barrier()
            place = tl.arange(0, STOP_PAD)
            banned = tl.load(stop_ids + slot * num_stop_ids + place, mask=place < num_stop_ids, other=-1)
            here = (banned >= first) & (banned < first + CHUNK) & (banned < num_vocab)
            tl.store(adjusted + banned, -float("inf"), mask=here & (known < tl.load(min_length + slot)))
        if (changes & _ALLOWED) != 0:
            tl.debug_barrier()
            words = tl.load(allowed + slot * allowed_stride + ids // 32, mask=inside, other=0)
            tl.store(adjusted + ids, -float("inf"), mask=inside & ((words >> (ids % 32)) & 1 == 0))
        tl.debug_barrier()

    value = load_logits(logits, adjusted, changes, ids, inside)
    degree = tl.load(temperature + slot)
    if degree >= MIN_TEMPERATURE:
        value = value * tl.div_rn(1.0, degree)
        if not has_filters(top_k, top_p, min_p, slot, num_vocab):
            value += noise_tile(chunk, tl.load(seed_lo + slot), tl.load(seed_hi + slot), known)
    best, token = first_largest(value, ids)
    tl.store(best_values + row * tl.num_programs(1) + chunk, best)
    tl.store(best_ids + row * tl.num_programs(1) + chunk, token)


@triton.jit
def pick_kernel(
    logits,
    row_slot,
    temperature,
    top_p,
    min_p,
    top_k,
    seed_lo,
    seed_hi,
    num_tokens,
    flags,
    adjusted,
    best_values,
    best_ids,
    tile_values,
    tile_ids,
    sampled,
    scratch,
    num_rows,
    num_vocab,
    num_chunks,
    num_tiles,
    logits_stride,
    adjusted_stride,
    CHUNKS_PAD: tl.constexpr,
    TILES_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (Rmax,). TILES_PAD above 0: rows that do not need their logits take the best of `tile_values`."""
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slot + row, mask=row < num_rows, other=scratch).to(tl.int64)
    if slot == scratch:
        tl.store(sampled + row, -1)
        return
    if TILES_PAD > 0 and not needs_logits(flags, temperature, top_k, top_p, min_p, slot, num_vocab):
        tile = tl.arange(0, TILES_PAD)
        values = tl.load(tile_values + row * num_tiles + tile, mask=tile < num_tiles, other=-float("inf"))
        ids = tl.load(tile_ids + row * num_tiles + tile, mask=tile < num_tiles, other=NO_ID)
        _, token = first_largest(values, ids)
        tl.store(sampled + row, token)
        return
    chunk = tl.arange(0, CHUNKS_PAD)
    values = tl.load(best_values + row * num_chunks + chunk, mask=chunk < num_chunks, other=-float("inf"))
    ids = tl.load(best_ids + row * num_chunks + chunk, mask=chunk < num_chunks, other=NO_ID)
    largest, token = first_largest(values, ids)
    degree = tl.load(temperature + slot)
    draws = (degree >= MIN_TEMPERATURE) & (largest > -float("inf"))
    if draws & has_filters(top_k, top_p, min_p, slot, num_vocab):
        logits += row * logits_stride
        adjusted += row * adjusted_stride
        changes = tl.load(flags + slot)
        inverse = tl.div_rn(1.0, degree)
        least = _least_kept(logits, adjusted, changes, inverse, num_vocab, largest, top_k, top_p, min_p, slot)
        token = _draw(logits, adjusted, changes, inverse, num_vocab, least, seed_lo, seed_hi, num_tokens, slot)
    tl.store(sampled + row, token)


@triton.jit
def _least_kept(logits, adjusted, changes, inverse, num_vocab, largest, top_k, top_p, min_p, slot):
    """The least tempered logit that passes the row's filters."""
    keep, share, smallest = tl.load(top_k + slot), tl.load(top_p + slot), tl.load(min_p + slot)
    floor = largest - _NO_SHARE
    if smallest > 0.0:
        floor = tl.maximum(floor, largest + tl.log(smallest))
    count, least, _ = weigh(logits, adjusted, changes, inverse, num_vocab, largest, floor, False)
    if (keep > 0) & (keep < count):
        least = least_reaching(
            logits, adjusted, changes, inverse, num_vocab, least, largest, keep.to(tl.float32), False
        )
    if share < 1.0:
        mass, _, _ = weigh(logits, adjusted, changes, inverse, num_vocab, largest, least, True)
        least = least_reaching(logits, adjusted, changes, inverse, num_vocab, least, largest, share * mass, True)
    return least


@triton.jit
def _draw(logits, adjusted, changes, inverse, num_vocab, least, seed_lo, seed_hi, num_tokens, slot):
    """The token with the largest tempered logit + noise among those not below `least`."""
    lo, hi, known = tl.load(seed_lo + slot), tl.load(seed_hi + slot), tl.load(num_tokens + slot)
    tile = tl.arange(0, 4)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    best_values = tl.full([LANE], -float("inf"), tl.float32)
    best_ids = tl.arange(0, LANE)
    for first in range(0, num_vocab, CHUNK):
        ids = first + tile
        value = load_logits(logits, adjusted, changes, ids, ids < num_vocab) * inverse
        value = tl.where(value >= least, value + noise_tile(first // CHUNK, lo, hi, known), -float("inf"))
        column_best = tl.max(value, 0)
        column_id = tl.min(tl.where(value == column_best[None, :], ids, NO_ID), 0)
        best_ids = tl.where(column_best > best_values, column_id, best_ids)
        best_values = tl.maximum(column_best, best_values)
    _, token = first_largest(best_values, best_ids)
    return token


def sample(
    logits: Tensor,
    row_slot: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    repetition_penalty: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    top_k: Tensor,
    seed_lo: Tensor,
    seed_hi: Tensor,
    min_length: Tensor,
    num_tokens: Tensor,
    stop_ids: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
    allowed: Tensor,
    flags: Tensor,
    adjusted: Tensor,
    sampled: Tensor,
    tile_values: Tensor | None = None,
    tile_ids: Tensor | None = None,
) -> None:
    """See `ops.sample`. `tile_values [R, N]` float32 and `tile_ids [R, N]`: the best values of N tiles of the
    vocabulary, as chunks have them, and their tokens; `logits` then holds just the rows that need theirs."""
    num_rows, num_vocab = logits.shape
    num_chunks = triton.cdiv(num_vocab, CHUNK.value)
    num_tiles = 0 if tile_values is None else tile_values.shape[1]
    scratch = temperature.shape[0] - 1
    best_values = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    best_ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    if num_rows > 0:
        chunk_kernel[(num_rows, num_chunks)](
            logits, row_slot, temperature, top_p, min_p,
            repetition_penalty, presence_penalty, frequency_penalty, top_k,
            seed_lo, seed_hi, min_length, num_tokens, stop_ids, bias_ids, bias_values,
            output_counts, in_prompt, allowed, flags, adjusted, best_values, best_ids,
            scratch, num_vocab, logits.stride(0), adjusted.stride(0),
            output_counts.stride(0), in_prompt.stride(0), allowed.stride(0), stop_ids.stride(0), bias_ids.stride(0),
            STOP_PAD=triton.next_power_of_2(stop_ids.shape[1]), BIAS_PAD=triton.next_power_of_2(bias_ids.shape[1]),
            TILED=tile_values is not None, num_warps=CHUNK_NUM_WARPS, enable_fp_fusion=FP_FUSION,
            **early(logits.device),
        )  # fmt: skip
    pick_kernel[(sampled.shape[0],)](
        logits, row_slot, temperature, top_p, min_p, top_k, seed_lo, seed_hi, num_tokens, flags,
        adjusted, best_values, best_ids, tile_values, tile_ids, sampled,
        scratch, num_rows, num_vocab, num_chunks, num_tiles, logits.stride(0), adjusted.stride(0),
        CHUNKS_PAD=triton.next_power_of_2(num_chunks),
        TILES_PAD=triton.next_power_of_2(num_tiles) if num_tiles else 0,
        num_warps=FILTER_NUM_WARPS, **early(logits.device),
    )  # fmt: skip
