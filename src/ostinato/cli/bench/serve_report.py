"""A load test as JSON, without the address or the key of the server, and as tables."""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ostinato.cli.bench.record import portable
from ostinato.cli.bench.serve_stats import Outcome, summarize

if TYPE_CHECKING:
    from ostinato.cli.bench.serve_measure import Measured

BUSY = 0.8
"""Above this share of one core, the client's own work is likely to be part of the latencies."""

_LOCAL = ("127.0.0.1", "localhost", "::1")
_WORKLOAD = (
    "endpoint",
    "num_prompts",
    "random_input_len",
    "random_output_len",
    "random_range_ratio",
    "token_ids",
    "max_concurrency",
    "num_warmups",
    "ignore_eos",
    "temperature",
    "extra_body",
    "seed",
)


def make_report(args: argparse.Namespace, measured: Measured) -> dict[str, Any]:
    # JSON has no infinity; null is the rate of a test that sends all at once
    rate = None if math.isinf(args.request_rate) else args.request_rate
    late = [1e3 * (outcome.sent_s - outcome.due_s) for outcome in measured.outcomes]
    return {
        "benchmark": "serve",
        "command": shlex.join(public_command(args.command_line, args.url)),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "server": {"model": portable(measured.model), "version": measured.server_version},
        "client": measured.client | {"busy_share": measured.busy_share},
        "workload": {name: getattr(args, name) for name in _WORKLOAD} | {"request_rate": rate},
        "summary": summarize(measured.outcomes, dict(args.goodput)),
        "sent_late_ms": {"median": statistics.median(late), "max": max(late)},
        "requests": [_row(outcome) for outcome in measured.outcomes],
    }


def public_command(words: list[str], url: str) -> list[str]:
    """The command line with the key, and an address that is not this machine's own, left out."""
    public = []
    hide_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        if hide_next:
            word = "KEY"
        elif name == "--api-key" and equals:
            word = "--api-key=KEY"
        elif word == url and urlsplit(url if "://" in url else f"//{url}").hostname not in _LOCAL:
            word = "URL"
        public.append(portable(word))
        hide_next = name == "--api-key" and not equals
    return public


def _row(outcome: Outcome) -> dict[str, Any]:
    """One request. Latencies are None where it failed, whatever had arrived by then."""
    row: dict[str, Any] = {
        "due_s": outcome.due_s,
        "sent_s": outcome.sent_s,
        "end_s": outcome.end_s,
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "chunks": len(outcome.output_times),
        "failure": outcome.failure,
    }
    done = outcome.failure is None
    row["ttft_ms"] = 1e3 * outcome.ttft_s if done else None
    row["e2el_ms"] = 1e3 * outcome.e2el_s if done else None
    return row


def print_report(report: dict[str, Any]) -> None:
    from ostinato.cli.report import make_console, make_table

    console, work, summary = make_console(), report["workload"], report["summary"]
    version = f", server {report['server']['version']}" if report["server"]["version"] else ""
    rate = "all at once" if work["request_rate"] is None else f"{work['request_rate']:g} requests/s"
    cap = f", at most {work['max_concurrency']} open" if work["max_concurrency"] else ""
    console.print(f"{report['server']['model']}{version}: {work['endpoint']}, {rate}{cap}")
    prompts = "" if summary["prompt_tokens"] is None else f"{summary['prompt_tokens']:,} tokens in, "
    chunks = "" if summary["tokens_counted_by"] == "server" else " (chunks: the server counts no tokens)"
    console.print(
        f"{summary['num_completed']} of {summary['num_requests']} requests completed in {summary['duration_s']:.2f} s: "
        f"{prompts}{summary['output_tokens']:,} out{chunks}; at most {summary['max_in_flight']} open"
    )
    rates = make_table("throughput", "per s")
    for title, name in (("requests", "requests"), ("output tokens", "output_tokens"), ("all tokens", "total_tokens")):
        value = summary[f"{name}_per_s"]
        rates.add_row(title, "-" if value is None else f"{value:,.2f}" if name == "requests" else f"{value:,.0f}")
    if (goodput := summary["goodput"]) is not None:
        limits = ", ".join(f"{name} {value:g} ms" for name, value in goodput["limits_ms"].items())
        good = f"{goodput['num_good']} of {summary['num_requests']}"
        rates.add_row(f"requests within {limits} ({good})", f"{goodput['requests_per_s']:,.2f}")
    console.print(rates)
    latencies = make_table("ms", "mean", "median", "p90", "p99")
    for title, name in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2el")):
        values = summary[f"{name}_ms"] or {}
        shown = (values.get(column) for column in ("mean", "median", "p90", "p99"))
        latencies.add_row(title, *("-" if value is None else f"{value:,.2f}" for value in shown))
    console.print(latencies)
    if summary["failures"]:
        failures = make_table("failed", "requests", "the first says")
        failures.columns[-1].justify, failures.columns[-1].no_wrap = "left", False
        for failure in summary["failures"]:
            failures.add_row(failure["reason"], str(failure["count"]), failure["first"])
        console.print(failures)
    busy = report["client"]["busy_share"]
    if busy > BUSY:
        console.print(
            f"this client used {busy:.0%} of a core: it is part of what was measured, and more --client-processes help"
        )
