"""What requests add up to."""

from __future__ import annotations

import pytest

from ostinato.engine.request_stats import TOKEN_S, Histogram


def test_equal_times_may_be_counted_together() -> None:
    together, one_by_one = Histogram(TOKEN_S), Histogram(TOKEN_S)
    for value, count in ((0.0005, 3), (0.0021, 2), (9.0, 4)):
        together.observe(value, count)
        for _ in range(count):
            one_by_one.observe(value)
    assert together.counts == one_by_one.counts
    assert (together.counts[0], together.counts[-1], together.num_observed) == (3, 4, 9)
    assert together.total == pytest.approx(one_by_one.total)
