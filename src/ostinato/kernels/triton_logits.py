"""What the sampling kernels share: reading a row of logits, its Gumbel noise, and the first of the largest."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.random import philox_impl

from ostinato.kernels import reference_sampling as spec

__all__ = ["CHUNK", "LANE", "NO_ID", "first_largest", "load_logits", "noise_tile"]

LANE = tl.constexpr(spec.LANE)
CHUNK = tl.constexpr(4 * spec.LANE)
"""Tokens that one pass of a program takes as a [4, LANE] tile: the four words of its Philox counters."""

NO_ID = tl.constexpr(2**31 - 1)


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
    word = tl.where(lane < 2, tl.where(lane == 0, word_0, word_1), tl.where(lane == 2, word_2, word_3))
    uniform = (word >> 9).to(tl.float32) * 1.1920928955078125e-07 + 5.9604644775390625e-08  # 2^-23, 2^-24
    return -tl.log(-tl.log(uniform))


@triton.jit
def first_largest(values, ids):
    """The largest of some values, and the lowest id that has it."""
    largest = tl.max(values)
    return largest, tl.min(tl.where(values == largest, ids, NO_ID))
