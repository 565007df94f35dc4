"""Top-k and top-p of one row without sorting: the largest logit at which enough of the row is kept.

Both filters ask the same question of a weight per token, 1 for top-k and exp(logit) for top-p: which is the largest
logit such that the tokens not below it weigh at least so much? Bisection over the logits finds it: every pass over the
row weighs one side of the middle and moves one end of the interval to the nearest logit that exists, so the answer is
exact, ties included, and the number of passes is about the logarithm of the number of distinct logits between.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from ostinato.kernels.triton_logits import load_logits

__all__ = ["FILTER_COLUMNS", "FILTER_LINES", "FILTER_NUM_WARPS", "least_reaching", "weigh"]

# A pass reads [lines, columns] at once. With these numbers a thread holds whole columns (4 of them, 4 lines each), so
# that reducing over the lines needs no exchange between threads, and enough loads are in flight to hide their latency.
FILTER_LINES = tl.constexpr(4)
FILTER_COLUMNS = tl.constexpr(2048)
FILTER_NUM_WARPS = 16


@triton.jit
def weigh(logits, adjusted, is_adjusted, inverse_temperature, num_vocab, largest, middle, by_mass):
    """One pass over a row: the weight of the tempered logits not below `middle`, the least of them, and the largest
    of the others. `by_mass`: weigh exp(logit - largest) instead of 1."""
    tile = tl.arange(0, FILTER_LINES)[:, None].to(tl.int32) * FILTER_COLUMNS + tl.arange(0, FILTER_COLUMNS)[None, :]
    weight = tl.zeros([FILTER_COLUMNS], tl.float32)
    above = tl.full([FILTER_COLUMNS], float("inf"), tl.float32)
    below = tl.full([FILTER_COLUMNS], -float("inf"), tl.float32)
    for first in range(0, num_vocab, FILTER_LINES * FILTER_COLUMNS):
        ids = first + tile
        value = load_logits(logits, adjusted, is_adjusted, ids, ids < num_vocab) * inverse_temperature
        kept = value >= middle
        each = tl.where(by_mass, tl.exp(value - largest), 1.0)
        weight += tl.sum(tl.where(kept, each, 0.0), 0)
        above = tl.minimum(above, tl.min(tl.where(kept, value, float("inf")), 0))
        below = tl.maximum(below, tl.max(tl.where(kept, -float("inf"), value), 0))
    return tl.sum(weight), tl.min(above), tl.max(below)


@triton.jit
def least_reaching(logits, adjusted, is_adjusted, inverse_temperature, num_vocab, low, largest, target, by_mass):
    """The largest tempered logit such that those not below it weigh at least `target`; those from `low` on do."""
    high = largest
    while low < high:  # both are logits of the row; `low` reaches the target and what lies above `high` does not
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)
        weight, above, below = weigh(
            logits, adjusted, is_adjusted, inverse_temperature, num_vocab, largest, middle, by_mass
        )
        low = tl.where(weight >= target, above, low)
        high = tl.where(weight >= target, high, below)
    return low
