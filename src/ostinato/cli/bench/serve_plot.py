"""A load test as a picture: how latencies are distributed, and how the test went over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ostinato.cli.bench.serve_stats import Outcome
from ostinato.errors import ConfigError

LINE, SECOND, GRID = "#1f5fa8", "#b4560f", "#dddddd"
_SLICES = 60


def require_matplotlib() -> None:
    """Raises ConfigError before anything is measured rather than after it."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("--png needs matplotlib: pip install matplotlib") from None


def token_rates(outcomes: Sequence[Outcome], slices: int = _SLICES) -> tuple[list[float], list[float]]:
    """The middles of equal slices of the test, in s, and output tokens per second in each.

    A request's tokens are spread evenly over its chunks. Those of failed requests are left out, as everywhere.
    """
    end = max((outcome.end_s for outcome in outcomes), default=0.0) or 1.0
    width = end / slices
    counts = [0.0] * slices
    for outcome in outcomes:
        if outcome.failure is None:
            share = outcome.output_tokens / len(outcome.output_times)
            for moment in outcome.output_times:
                counts[min(slices - 1, int(moment / width))] += share
    return [(place + 0.5) * width for place in range(slices)], [count / width for count in counts]


def open_requests(outcomes: Sequence[Outcome]) -> tuple[list[float], list[int]]:
    """When the number of open requests changes, and to what."""
    changes = [(outcome.sent_s, 1) for outcome in outcomes] + [(outcome.end_s, -1) for outcome in outcomes]
    moments, counts, now = [0.0], [0], 0
    for moment, change in sorted(changes):
        now += change
        moments.append(moment)
        counts.append(now)
    return moments, counts


def draw(report: dict[str, Any], outcomes: Sequence[Outcome], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [outcome for outcome in outcomes if outcome.failure is None]
    summary, work = report["summary"], report["workload"]
    figure, axes = pyplot.subplots(2, 2, figsize=(10.0, 6.4), dpi=140, layout="constrained")
    panels = (
        (axes[0][0], "time to the first token", "ttft_ms", [outcome.ttft_s for outcome in done]),
        (axes[0][1], "time between chunks", "itl_ms", [gap for outcome in done for gap in outcome.itl_s()]),
        (axes[1][0], "time to the last token", "e2el_ms", [outcome.e2el_s for outcome in done]),
    )
    for panel, title, name, seconds in panels:
        _draw_distribution(panel, title, [1e3 * value for value in seconds], summary[name])
    course = axes[1][1]
    course.fill_between(*token_rates(outcomes), step="mid", color=LINE, alpha=0.35, linewidth=0)
    course.set_ylabel("output tokens/s", color=LINE)
    course.set_xlabel("s")
    course.set_title("course of the test", fontsize=10)
    course.grid(True, color=GRID, linewidth=0.7)
    course.set_ylim(bottom=0)
    beside = course.twinx()
    beside.step(*open_requests(outcomes), where="post", color=SECOND, linewidth=1.4)
    beside.set_ylabel("open requests", color=SECOND)
    beside.set_ylim(bottom=0)
    rate = "all at once" if work["request_rate"] is None else f"{work['request_rate']:g} requests/s"
    cap = f", at most {work['max_concurrency']} open" if work["max_concurrency"] else ""
    failed = summary["num_requests"] - summary["num_completed"]
    figure.suptitle(
        f"{report['server']['model']}: {summary['num_requests']} requests, {rate}{cap}; "
        f"{summary['output_tokens_per_s']:,.0f} output tokens/s" + (f", {failed} failed" if failed else ""),
        fontsize=11,
    )
    figure.savefig(path, facecolor="white")
    pyplot.close(figure)


def _draw_distribution(axes: Any, title: str, values: list[float], summary: dict[str, float] | None) -> None:
    """What share of the values lies below each. On a logarithmic axis where they differ by more than 20 times."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("ms")
    axes.set_ylabel("share of all")
    axes.set_ylim(0, 1.02)
    axes.grid(True, color=GRID, linewidth=0.7)
    if summary is None:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", va="center", color="#666666")
        return
    # chunks that arrive together are 0 ms apart, which a logarithmic axis cannot show
    shown = sorted(max(value, 1e-3) for value in values)
    axes.step(shown, [(place + 1) / len(shown) for place in range(len(shown))], where="post", color=LINE, linewidth=1.8)
    if shown[-1] > 20 * shown[0]:
        axes.set_xscale("log")
    for name, style in (("median", "--"), ("p99", ":")):
        label = f"{name} {summary[name]:,.{_digits(summary[name])}f} ms"
        axes.axvline(max(summary[name], 1e-3), color=SECOND, linestyle=style, linewidth=1.4, label=label)
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def _digits(value: float) -> int:
    """Decimals that leave three figures."""
    return max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
