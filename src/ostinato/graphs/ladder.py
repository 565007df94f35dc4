"""Ladders from traffic: the sizes that serve counted steps with the least padding, by an exact dynamic programme.
No torch.

A size b serves the live sizes above its predecessor a, so a ladder costs the sum over neighbours (a, b) of

    (steps with a < n <= b) * cost(b).

The dispatcher runs a step eagerly rather than padding it by more than `max_padding_factor`. Such a step is charged as
if it had been padded, and a ladder is judged first by how many of these it has, then by its work: how much slower an
eager step is depends on the device, and a few sizes more avoid all of them. With `cover` it is judged between the two
by the sizes from 1 to the limit that would run eagerly if they came, so that traffic may change.

All three parts satisfy the quadrangle inequality where the cost of a size never falls as sizes grow (the second and the
number of eager steps are convex functions of x(b) - y(a), x and y rising). So the best predecessor rises with b, and a
row of the programme is filled by divide and conquer: O(W m log m) for m candidates and a budget of W sizes instead of
O(W m^2). Costs are whole numbers and the order is made one by scaling, so nothing is rounded.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ostinato.errors import ConfigError

__all__ = ["MOST_UNITS", "Demand", "Fit", "best_ladder", "best_ladders", "coarse_size", "fit"]

_EXACT_TO, _BITS = 512, 5

MOST_UNITS = 512
"""Parts that a budget of bytes is divided into where the sizes' bytes have no larger common divisor."""


def coarse_size(size: int) -> int:
    """`size` up to 512; above, rounded up to one of 32 sizes an octave: at most 1/32 more."""
    if size <= _EXACT_TO:
        return size
    step = 1 << ((size - 1).bit_length() - 1 - _BITS)
    return -(-size // step) * step


def _same(size: int) -> int:
    return size


@dataclass(frozen=True, slots=True)
class Demand:
    """Steps that one ladder shall serve: `counts[n]` of live size n, in requests or tokens, 1 to `limit`.

    Every ladder for it ends in `limit`. `cost_of(size)` is what a step at that size costs, a whole number that never
    falls as sizes grow; by default the size itself, so that the work is what steps compute, padding included.
    `bytes_of(size)` is what its recording holds, for a budget of bytes. Raises ConfigError for counts outside.
    """

    counts: Mapping[int, int]
    limit: int
    cost_of: Callable[[int], int] = _same
    bytes_of: Callable[[int], int] | None = None

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ConfigError(f"a ladder needs a limit of at least 1, got {self.limit}")
        wrong = [size for size in self.counts if not 1 <= size <= self.limit]
        if wrong:
            raise ConfigError(f"steps of {sorted(wrong)} were counted, outside 1..{self.limit}, the ladder's limit")
        if any(count < 0 for count in self.counts.values()):
            raise ConfigError("counts of steps must be at least 0")


@dataclass(frozen=True, slots=True)
class Fit:
    """How a ladder serves a demand. `work` is by the demand's cost, of eager steps at their live size."""

    steps: int
    live: int
    work: int
    eager: int

    @property
    def padding(self) -> float:
        """Share of the work that is padding, where the work counts requests or tokens."""
        return 1 - self.live / self.work if self.work else 0.0


def fit(demand: Demand, ladder: Sequence[int], max_padding_factor: float = 2.0) -> Fit:
    """What the dispatcher would make of the demand with this increasing ladder."""
    steps = live = work = eager = 0
    for size, count in demand.counts.items():
        at = bisect_left(ladder, size)
        replayed = at < len(ladder) and ladder[at] <= max_padding_factor * size
        steps, live = steps + count, live + count * size
        work += count * demand.cost_of(ladder[at] if replayed else size)
        eager += 0 if replayed else count
    return Fit(steps, live, work, eager)


def best_ladder(
    demand: Demand,
    *,
    max_sizes: int | None = None,
    max_bytes: int | None = None,
    max_padding_factor: float = 2.0,
    cover: bool = True,
) -> tuple[int, ...]:
    """`best_ladders` for one."""
    budget = {"max_sizes": max_sizes, "max_bytes": max_bytes}
    return best_ladders([demand], **budget, max_padding_factor=max_padding_factor, cover=cover)[0]


def best_ladders(
    demands: Sequence[Demand],
    *,
    max_sizes: int | None = None,
    max_bytes: int | None = None,
    max_padding_factor: float = 2.0,
    cover: bool = True,
) -> tuple[tuple[int, ...], ...]:
    """One increasing ladder for each demand, which together have at most `max_sizes` entries or hold at most
    `max_bytes`: those with the fewest eager steps, of these with the least work (module docstring).

    For a number of sizes without `cover` no ladder whatever is better. Otherwise sizes that were not seen are
    candidates too: all up to 512, 32 an octave above. `cover` is given up where the budget does not do for it. Bytes
    are rounded up to a common divisor, or to `max_bytes` / MOST_UNITS where that is more. Raises ConfigError for a
    budget that does not hold the limits alone, for none or two budgets, and for costs that fall.
    """
    if (max_sizes is None) == (max_bytes is None):
        raise ConfigError("give either a number of sizes or a number of bytes as the budget")
    if max_padding_factor < 1.0:
        raise ConfigError(f"max_padding_factor={max_padding_factor}: must be at least 1 (inf for no limit)")
    candidates = [_candidates(demand, cover or max_bytes is not None) for demand in demands]
    if max_sizes is not None:
        units, budget = [[1] * len(sizes) for sizes in candidates], min(max_sizes, sum(map(len, candidates)))
    else:
        assert max_bytes is not None
        units, budget = _units_of(demands, candidates, max_bytes)
    least = sum(own[-1] for own in units)
    if least > budget:
        asked = f"{max_sizes} sizes" if max_sizes is not None else f"{max_bytes} bytes"
        raise ConfigError(f"a budget of {asked} does not hold the largest size of each ladder: allow more")

    most_work = sum(sum(demand.counts.values()) * demand.cost_of(demand.limit) for demand in demands)
    scale = _Scale(1 + sum(demand.limit for demand in demands), 1 + most_work)
    programmes = [
        _Programme(demand, sizes, own, budget, max_padding_factor, scale, cover)
        for demand, sizes, own in zip(demands, candidates, units, strict=True)
    ]
    value, shares = _share_out([programme.values for programme in programmes], budget)
    if cover and scale.uncovered(value):
        budgets = {"max_sizes": max_sizes, "max_bytes": max_bytes}
        return best_ladders(demands, **budgets, max_padding_factor=max_padding_factor, cover=False)
    return tuple(programme.ladder(share) for programme, share in zip(programmes, shares, strict=True))


@dataclass(frozen=True, slots=True)
class _Scale:
    """Makes (eager steps, uncovered sizes, work) one number of the same order."""

    above_uncovered: int
    above_work: int

    def weigh(self, eager: int, uncovered: int, work: int) -> int:
        return (eager * self.above_uncovered + uncovered) * self.above_work + work

    def uncovered(self, value: int) -> int:
        return value // self.above_work % self.above_uncovered


class _Programme:
    """The best ladders of one demand for every budget up to `budget` units.

    Position 0 is the start, position j the candidate j - 1. `best[w][j]` is the least value of a ladder for all steps
    up to candidate j that ends there and takes at most w units; its predecessor is `_before[w - units(j)][j]`.
    """

    def __init__(
        self,
        demand: Demand,
        sizes: Sequence[int],
        units: Sequence[int],
        budget: int,
        factor: float,
        scale: _Scale,
        cover: bool,
    ) -> None:
        self._sizes, self._units = (0, *sizes), (0, *units)
        costs = [0, *(demand.cost_of(size) for size in sizes)]
        if any(above < below for below, above in pairwise(costs)):
            raise ConfigError("the cost of a size must not fall as sizes grow: replace each by the largest so far")
        seen = sorted(demand.counts)
        sums = [0, *accumulate(demand.counts[size] for size in seen)]

        def steps_to(size: int) -> int:
            return sums[bisect_left(seen, size + 1)]

        count = len(self._sizes)
        self._costs, self._steps = costs, [steps_to(size) for size in self._sizes]
        # the largest live size that is too small to be padded to candidate j, and the steps up to it
        self._too_small = [max(0, math.ceil(size / factor) - 1) for size in self._sizes]
        self._steps_too_small = [steps_to(size) for size in self._too_small]
        self._weight_eager, self._weight_uncovered = scale.weigh(1, 0, 0), scale.weigh(0, 1, 0) if cover else 0
        self._never = scale.weigh(1 + sum(demand.counts.values()), 0, 0)

        rows: list[list[int]] = []  # rows[w][j]: the least over predecessors i of best[w][i] + the cost of (i, j)
        self._before: list[list[int]] = []
        self.values: list[int | None] = []
        for w in range(budget + 1):
            best = [0] + [rows[w - self._units[j]][j] if w >= self._units[j] else self._never for j in range(1, count)]
            self.values.append(None if best[-1] >= self._never else best[-1])
            row, before = [0] * count, [0] * count
            self._fill(best, row, before, 1, count - 1, 0, count - 2)
            rows.append(row)
            self._before.append(before)

    def ladder(self, units: int) -> tuple[int, ...]:
        found, j = list[int](), len(self._sizes) - 1
        while j:
            found.append(self._sizes[j])
            units -= self._units[j]
            j = self._before[units][j]
        return tuple(reversed(found))

    def _fill(
        self, best: list[int], row: list[int], before: list[int], low: int, high: int, first: int, last: int
    ) -> None:
        """Positions low..high of a row, whose best predecessors are known to lie in first..last."""
        if low > high:
            return
        j = (low + high) // 2
        size_eager, size_small = self._steps_too_small[j], self._too_small[j]
        steps, cost, sizes, all_steps = self._steps[j], self._costs[j], self._sizes, self._steps
        least, at = -1, first
        for i in range(first, min(last, j - 1) + 1):
            value = best[i] + (steps - all_steps[i]) * cost
            if (eager := size_eager - all_steps[i]) > 0:
                value += eager * self._weight_eager
            if (uncovered := size_small - sizes[i]) > 0:
                value += uncovered * self._weight_uncovered
            if least < 0 or value < least:
                least, at = value, i
        row[j], before[j] = least, at
        self._fill(best, row, before, low, j - 1, first, at)
        self._fill(best, row, before, j + 1, high, at, last)


def _candidates(demand: Demand, unseen: bool) -> list[int]:
    """A size that no step has may be lowered to the next one that some step has: no step gets more expensive by that.
    It may only cover less, or hold more bytes."""
    sizes = {size for size, count in demand.counts.items() if count} | {demand.limit}
    if unseen:
        sizes |= {coarse_size(size) for size in range(1, demand.limit)}
    return sorted(size for size in sizes if size <= demand.limit)


def _units_of(
    demands: Sequence[Demand], candidates: Sequence[Sequence[int]], max_bytes: int
) -> tuple[list[list[int]], int]:
    """What each candidate takes of the budget, and the budget, in whole units of bytes."""
    tables: list[list[int]] = []
    for demand, sizes in zip(demands, candidates, strict=True):
        if demand.bytes_of is None:
            raise ConfigError("a budget of bytes needs to know what a recording of each size holds")
        tables.append([max(1, demand.bytes_of(size)) for size in sizes])
    unit = math.gcd(*(number for table in tables for number in table))
    if max_bytes // unit > MOST_UNITS:
        unit = -(-max_bytes // MOST_UNITS)
    units = [[-(-number // unit) for number in table] for table in tables]
    return units, min(max_bytes // unit, sum(map(sum, units)))


def _share_out(fronts: Sequence[Sequence[int | None]], budget: int) -> tuple[int, list[int]]:
    """The least sum of one value of each front whose positions add up to at most `budget`, and the positions."""
    best: list[tuple[int, list[int]] | None] = [(0, [])] * (budget + 1)
    for front in fronts:
        best = [_least(best, front, within) for within in range(budget + 1)]
    found = best[budget]
    assert found is not None, "the caller has seen that the limits alone fit"
    return found


def _least(
    best: Iterable[tuple[int, list[int]] | None], front: Sequence[int | None], within: int
) -> tuple[int, list[int]] | None:
    least: tuple[int, list[int]] | None = None
    for used, earlier in enumerate(best):
        if used > within:
            break
        value = front[within - used]
        if earlier is not None and value is not None and (least is None or earlier[0] + value < least[0]):
            least = earlier[0] + value, [*earlier[1], within - used]
    return least
