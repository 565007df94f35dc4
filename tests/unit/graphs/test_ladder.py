"""The dynamic programme against every ladder there is, and what surrounds it."""

from __future__ import annotations

import math
import time
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import ConfigError
from ostinato.graphs.buckets import mixed_ladder, uniform_ladder
from ostinato.graphs.dispatch import BatchShape, Dispatcher
from ostinato.graphs.ladder import Demand, best_ladder, best_ladders, coarse_size, fit
from ostinato.graphs.mode import CUDAGraphMode, RuntimeMode

LIMIT = 9
COUNTS = st.dictionaries(st.integers(1, LIMIT), st.integers(0, 20))
FACTORS = st.sampled_from([1.0, 1.5, 2.0, 3.0, math.inf])
COSTS = st.lists(st.integers(0, 9), min_size=LIMIT, max_size=LIMIT).map(lambda steps: [0, *_sums(steps)])


def _sums(steps: list[int]) -> list[int]:
    return [sum(steps[: index + 1]) for index in range(len(steps))]


def every_ladder(limit: int) -> list[tuple[int, ...]]:
    below = range(1, limit)
    return [(*chosen, limit) for count in range(limit) for chosen in combinations(below, count)]


def value(demand: Demand, ladder: tuple[int, ...], factor: float, cover: bool = False) -> tuple[int, int, int]:
    """What a ladder is judged by, in order, straight from the definition."""
    eager = uncovered = work = 0
    for size in range(1, demand.limit + 1):
        served = min(entry for entry in ladder if entry >= size)
        too_much = served > factor * size
        eager += demand.counts.get(size, 0) * too_much
        uncovered += too_much
        work += demand.counts.get(size, 0) * demand.cost_of(served)
    return eager, uncovered if cover else 0, work


@settings(deadline=None)
@given(COUNTS, st.integers(1, LIMIT), FACTORS, COSTS)
def test_no_ladder_of_so_many_sizes_is_better(
    counts: dict[int, int], max_sizes: int, factor: float, costs: list[int]
) -> None:
    demand = Demand(counts, LIMIT, costs.__getitem__)
    found = best_ladder(demand, max_sizes=max_sizes, max_padding_factor=factor, cover=False)
    assert len(found) <= max_sizes
    assert found == tuple(sorted(set(found)))
    assert found[-1] == LIMIT
    others = [ladder for ladder in every_ladder(LIMIT) if len(ladder) <= max_sizes]
    assert value(demand, found, factor) == min(value(demand, ladder, factor) for ladder in others)


@settings(deadline=None)
@given(COUNTS, st.integers(1, LIMIT), FACTORS)
def test_where_all_sizes_can_be_covered_they_are(counts: dict[int, int], max_sizes: int, factor: float) -> None:
    """Steps that come are served first; where these leave no size uncovered, that holds for all sizes."""
    demand = Demand(counts, LIMIT)
    found = best_ladder(demand, max_sizes=max_sizes, max_padding_factor=factor)
    values = [value(demand, ladder, factor, True) for ladder in every_ladder(LIMIT) if len(ladder) <= max_sizes]
    if min(values)[1] == 0:
        assert value(demand, found, factor, True) == min(values)
    else:
        assert value(demand, found, factor) == min((eager, 0, work) for eager, _, work in values)


@settings(deadline=None)
@given(COUNTS, st.lists(st.integers(1, 12), min_size=LIMIT, max_size=LIMIT), st.integers(12, 80), FACTORS)
def test_no_ladder_of_so_many_bytes_is_better(
    counts: dict[int, int], table: list[int], max_bytes: int, factor: float
) -> None:
    demand = Demand(counts, LIMIT, bytes_of=lambda size: table[size - 1])
    found = best_ladder(demand, max_bytes=max_bytes, max_padding_factor=factor, cover=False)

    def held(ladder: tuple[int, ...]) -> int:
        return sum(table[size - 1] for size in ladder)

    assert held(found) <= max_bytes
    others = [ladder for ladder in every_ladder(LIMIT) if held(ladder) <= max_bytes]
    assert value(demand, found, factor) == min(value(demand, ladder, factor) for ladder in others)


@settings(deadline=None, max_examples=40)
@given(
    st.dictionaries(st.integers(1, 6), st.integers(0, 20)),
    st.dictionaries(st.integers(1, 7), st.integers(0, 20)),
    st.integers(2, 13),
)
def test_two_ladders_share_a_budget_in_the_best_way(
    first: dict[int, int], second: dict[int, int], max_sizes: int
) -> None:
    demands = [Demand(first, 6), Demand(second, 7)]
    found = best_ladders(demands, max_sizes=max_sizes, cover=False)
    assert sum(map(len, found)) <= max_sizes

    def both(ladders: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
        values = [value(demand, ladder, 2.0) for demand, ladder in zip(demands, ladders, strict=True)]
        return tuple(map(sum, zip(*values, strict=True)))

    others = [(one, two) for one in every_ladder(6) for two in every_ladder(7) if len(one) + len(two) <= max_sizes]
    assert both(found) == min(map(both, others))


@given(st.dictionaries(st.integers(1, 40), st.integers(1, 9)), st.sets(st.integers(1, 40), min_size=1), FACTORS)
def test_fit_is_what_the_dispatcher_does(counts: dict[int, int], sizes: set[int], factor: float) -> None:
    dispatcher = Dispatcher(CUDAGraphMode.FULL, sorted(sizes), (), 40, max_padding_factor=factor)
    found = fit(Demand(counts, 40), sorted(sizes), factor)
    decisions = [(dispatcher.pick(BatchShape(size, size, 1)), count) for size, count in counts.items()]
    assert found.work == sum(decision.key.num_tokens * count for decision, count in decisions)
    assert found.eager == sum(count for decision, count in decisions if decision.mode is RuntimeMode.NONE)
    assert found.live == sum(size * count for size, count in counts.items())
    assert found.steps == sum(counts.values())


@pytest.mark.parametrize("size", [1, 255, 512, 513, 528, 529, 1024, 1025, 2048, 2049, 8191, 16384, 100_000])
def test_coarse_sizes(size: int) -> None:
    coarse = coarse_size(size)
    assert size <= coarse <= size * 33 / 32
    assert coarse_size(coarse) == coarse
    assert coarse == size or size > 512


def test_there_are_few_coarse_sizes() -> None:
    assert len({coarse_size(size) for size in range(1, 16385)}) == 512 + 5 * 32


def test_all_sizes_of_a_large_engine_take_seconds_at_most() -> None:
    uniform = Demand({size: 1 + size * 7919 % 1000 for size in range(1, 513)}, 512)
    mixed = Demand({coarse_size(size): 1 + size * 7919 % 100 for size in range(1, 8193)}, 8192)
    defaults = uniform_ladder(512), mixed_ladder(8192)
    began = time.process_time()
    found = best_ladders([uniform, mixed], max_sizes=sum(map(len, defaults)))
    assert time.process_time() - began < 30
    works = [
        sum(fit(demand, ladder).work for demand, ladder in zip((uniform, mixed), ladders, strict=True))
        for ladders in (found, defaults)
    ]
    assert works[0] < works[1]
    assert not any(fit(demand, ladder).eager for demand, ladder in zip((uniform, mixed), found, strict=True))


def test_a_budget_in_rounded_units_is_kept() -> None:
    """Byte sizes without a common divisor: what is handed out stays below the budget all the same."""
    demand = Demand(dict.fromkeys(range(1, 65), 1), 64, bytes_of=lambda size: 100_003 + 7 * size)
    found = best_ladder(demand, max_bytes=2_000_000)
    assert 17 <= len(found) <= 19
    assert sum(100_003 + 7 * size for size in found) <= 2_000_000


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Demand({5: 1}, 4), r"steps of \[5\] were counted, outside 1..4"),
        (lambda: Demand({0: 1}, 4), r"steps of \[0\]"),
        (lambda: Demand({1: -1}, 4), "at least 0"),
        (lambda: Demand({}, 0), "limit of at least 1"),
        (lambda: best_ladder(Demand({}, 4)), "either a number of sizes or a number of bytes"),
        (lambda: best_ladder(Demand({}, 4), max_sizes=1, max_bytes=1), "either a number of sizes"),
        (lambda: best_ladder(Demand({}, 4), max_sizes=0), "0 sizes does not hold the largest"),
        (lambda: best_ladder(Demand({}, 4), max_bytes=100), "what a recording of each size holds"),
        (lambda: best_ladder(Demand({}, 4, bytes_of=lambda size: 60), max_bytes=50), "50 bytes does not hold"),
        (lambda: best_ladder(Demand({1: 1}, 4, lambda size: -size), max_sizes=2), "must not fall"),
        (lambda: best_ladder(Demand({}, 4), max_sizes=2, max_padding_factor=0.5), "max_padding_factor=0.5"),
    ],
)
def test_what_cannot_be(call: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call()  # type: ignore[operator]
