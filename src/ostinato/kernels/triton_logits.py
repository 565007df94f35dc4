"""What the sampling kernels share: reading a row of logits, its Gumbel noise, and the first of the largest."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.random import philox_impl

from ostinato.kernels import reference_sampling as spec

__all__ = [
    "CHUNK",
    "LANE",
    "MIN_TEMPERATURE",
    "NO_ID",
    "first_largest",
    "has_filters",
    "load_logits",
    "needs_logits",
    "noise_of",
    "noise_tile",
]

LANE = tl.constexpr(spec.LANE)
CHUNK = tl.constexpr(4 * spec.LANE)
"""Tokens that one pass of a program takes as a [4, LANE] tile: the four words of its Philox counters."""

NO_ID = tl.constexpr(2**31 - 1)
MIN_TEMPERATURE = tl.constexpr(spec.MIN_TEMPERATURE)


@triton.jit
def load_logits(logits, adjusted, is_adjusted, ids, inside):
    """Logits of one row as float32, from the adjusted copy if it has one; NaN, and what is not `inside`, as -inf."""
    raw = tl.load(logits + ids, mask=inside & (is_adjusted == 0), other=-float("inf")).to(tl.float32)
    copy = tl.load(adjusted + ids, mask=inside & (is_adjusted != 0), other=-float("inf"))
    value = tl.where(is_adjusted != 0, copy, raw)
    return tl.where(value == value, value, -float("inf"))


@triton.jit
def noise_tile(chunk, seed_lo, seed_hi, num_tokens):
    """Gumbel noise of the tokens of one chunk, [4, LANE]; the stream is specified in `reference_sampling`."""
    lane = tl.arange(0, 4)[:, None]
    counter = (tl.arange(0, LANE)[None, :] + chunk * LANE).to(tl.uint32)
    zero = counter * 0
    word_0, word_1, word_2, word_3 = philox_impl(
        counter, zero + num_tokens.to(tl.uint32), zero, zero, seed_lo.to(tl.uint32), seed_hi.to(tl.uint32)
    )
    return _gumbel(tl.where(lane < 2, tl.where(lane == 0, word_0, word_1), tl.where(lane == 2, word_2, word_3)))


@triton.jit
def noise_of(ids, seed_lo, seed_hi, num_tokens):
    """The same noise for any token ids `[R, N]`, of rows with seeds and lengths `[R, 1]`: a call of Philox for each,
    where `noise_tile` has one for four."""
    counter = (ids // CHUNK * LANE + ids % LANE).to(tl.uint32)
    zero = counter * 0
    word_0, word_1, word_2, word_3 = philox_impl(
        counter, zero + num_tokens.to(tl.uint32), zero, zero, seed_lo.to(tl.uint32), seed_hi.to(tl.uint32)
    )
    lane = ids // LANE % 4
    return _gumbel(tl.where(lane < 2, tl.where(lane == 0, word_0, word_1), tl.where(lane == 2, word_2, word_3)))


@triton.jit
def _gumbel(word):
    uniform = (word >> 9).to(tl.float32) * 1.1920928955078125e-07 + 5.9604644775390625e-08  # 2^-23, 2^-24
    return -tl.log(-tl.log(uniform))


@triton.jit
def has_filters(top_k, top_p, min_p, slot, num_vocab):
    """Whether rows at `slot`, one or a tensor of them, have a filter on."""
    keep = tl.load(top_k + slot)
    return ((keep > 0) & (keep < num_vocab)) | (tl.load(top_p + slot) < 1.0) | (tl.load(min_p + slot) > 0.0)


@triton.jit
def needs_logits(flags, temperature, top_k, top_p, min_p, slot, num_vocab):
    """Whether a token of the rows at `slot` cannot be chosen from the best ones of blocks of raw logits."""
    draws = tl.load(temperature + slot) >= MIN_TEMPERATURE
    return (tl.load(flags + slot) != 0) | (draws & has_filters(top_k, top_p, min_p, slot, num_vocab))


@triton.jit
def first_largest(values, ids):
    """The largest of some values, and the lowest id that has it."""
    largest = tl.max(values)
    return largest, tl.min(tl.where(values == largest, ids, NO_ID))
