"""Latencies, rates and failures of a load test, from the times at which things happened.

Only answers that came to their end have latencies or count as output. A request that failed is in `failures`, and among
those that met the limits it counts as one that did not.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

LIMITS = ("ttft", "tpot", "e2el")
"""What a request can be held to: time to its first token, time for each further one, time to its last."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. Times are seconds on the clock of the test, which is 0 when the first request is due.

    `output_times` are the arrivals of chunks with output; a chunk may hold several tokens. `output_tokens` is the
    server's own count, or the number of chunks where it gives none (`counted` is then False). `failure` is the kind of
    failure and `detail` what the server or the system said about it.
    """

    index: int
    due_s: float
    sent_s: float
    end_s: float
    output_times: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int = 0
    counted: bool = True
    failure: str | None = None
    detail: str = ""

    @property
    def ttft_s(self) -> float:
        return self.output_times[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        return self.output_times[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Of the tokens after the first; None where there is none."""
        if self.output_tokens < 2:
            return None
        return (self.output_times[-1] - self.output_times[0]) / (self.output_tokens - 1)

    def itl_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.output_times)]


def summarize(outcomes: Sequence[Outcome], goodput_ms: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Everything a report says. `goodput_ms` has limits by the names in LIMITS. Latencies are in ms."""
    done = [outcome for outcome in outcomes if outcome.failure is None]
    duration = max((outcome.end_s for outcome in outcomes), default=0.0)
    duration -= min((outcome.sent_s for outcome in outcomes), default=0.0)
    output_tokens = sum(outcome.output_tokens for outcome in done)
    prompts = [outcome.prompt_tokens for outcome in done if outcome.prompt_tokens is not None]
    prompt_tokens = sum(prompts) if len(prompts) == len(done) else None
    tpots = [tpot for outcome in done if (tpot := outcome.tpot_s) is not None]
    return {
        "num_requests": len(outcomes),
        "num_completed": len(done),
        "failures": _failures(outcomes),
        "duration_s": duration,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "tokens_counted_by": "server" if all(outcome.counted for outcome in done) else "chunks",
        "requests_per_s": _rate(len(done), duration),
        "output_tokens_per_s": _rate(output_tokens, duration),
        "total_tokens_per_s": None if prompt_tokens is None else _rate(prompt_tokens + output_tokens, duration),
        "max_in_flight": most_in_flight(outcomes),
        "ttft_ms": spread([outcome.ttft_s for outcome in done]),
        "tpot_ms": spread(tpots),
        "itl_ms": spread([gap for outcome in done for gap in outcome.itl_s()]),
        "e2el_ms": spread([outcome.e2el_s for outcome in done]),
        "goodput": _goodput(outcomes, duration, goodput_ms) if goodput_ms else None,
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """In ms; None of nothing."""
    if not seconds:
        return None
    values = sorted(1e3 * value for value in seconds)
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "p90": percentile(values, 90),
        "p99": percentile(values, 99),
        "min": values[0],
        "max": values[-1],
    }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Interpolated between the two nearest of the ascending values."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def most_in_flight(outcomes: Sequence[Outcome]) -> int:
    """The most requests that were open at one moment. One that ends as another is sent does not overlap it."""
    changes = [(outcome.sent_s, 1) for outcome in outcomes] + [(outcome.end_s, -1) for outcome in outcomes]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def meets(outcome: Outcome, limits_ms: Mapping[str, float]) -> bool:
    """Whether the request came to its end within every limit. With one token there is no TPOT to miss."""
    if outcome.failure is not None:
        return False
    took = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s or 0.0, "e2el": outcome.e2el_s}
    return all(1e3 * took[name] <= limit for name, limit in limits_ms.items())


def _goodput(outcomes: Sequence[Outcome], duration: float, limits_ms: Mapping[str, float]) -> dict[str, Any]:
    good = sum(meets(outcome, limits_ms) for outcome in outcomes)
    share = good / len(outcomes) if outcomes else 0.0
    return {"limits_ms": dict(limits_ms), "num_good": good, "share": share, "requests_per_s": _rate(good, duration)}


def _failures(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """By reason, the most frequent first, each with the details of its first request."""
    first: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.failure is not None:
            first.setdefault(outcome.failure, outcome.detail)
    counts = Counter(outcome.failure for outcome in outcomes if outcome.failure is not None)
    return [{"reason": reason, "count": count, "first": first[reason]} for reason, count in counts.most_common()]


def _rate(count: int, duration: float) -> float:
    return count / duration if duration > 0 else 0.0
