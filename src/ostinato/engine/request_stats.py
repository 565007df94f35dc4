"""What the requests of a serving engine have added up to: counts, and histograms of their times. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ostinato.request import FinishReason

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TOKEN_S = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
"""Upper bounds of buckets. Between tokens they begin at half a millisecond: a decode step of a small model."""


class Histogram:
    """Counts of observations by upper bound; the last count is of those above every bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`count` times the same."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def num_observed(self) -> int:
        return sum(self.counts)


class RequestStats:
    """One thread: the event loop's. Prompts count when their first token is out."""

    __slots__ = (
        "e2e_s",
        "finished",
        "inter_token_s",
        "num_generated_tokens",
        "num_prompt_tokens",
        "num_refused",
        "ttft_s",
    )

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_refused = 0  # for a full queue
        self.finished = {reason.value: 0 for reason in FinishReason}
        self.ttft_s = Histogram(TTFT_S)
        self.inter_token_s = Histogram(TOKEN_S)
        self.e2e_s = Histogram(REQUEST_S)
