"""A load test of a server with OpenAI's API, this one or another: latencies, throughput, goodput, failures.

Requests arrive at --request-rate (a Poisson process; inf sends all at once) and stream their answers. --max-concurrency
keeps that many open, so `--request-rate inf --max-concurrency 64` is a closed loop of 64.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ostinato.cli.bench import options, record
from ostinato.cli.bench.serve_load import CHAT, COMPLETIONS
from ostinato.cli.bench.serve_stats import LIMITS
from ostinato.cli.parser import UsageError
from ostinato.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ostinato bench serve [OPTIONS] URL"
    parser.add_argument("url", metavar="URL", help="of the server, such as http://127.0.0.1:8000")
    add = parser.add_argument
    add("--endpoint", choices=(COMPLETIONS, CHAT), default=COMPLETIONS, help=f"[{COMPLETIONS}]")
    add("--model", metavar="NAME", help="as the server calls it [the first that it lists]")
    add("--api-key", metavar="KEY", help="sent as a bearer token, kept out of the JSON [$OSTINATO_API_KEY]")
    add("--num-prompts", type=int, default=200, metavar="N", help="requests [200]")
    add("--random-input-len", type=int, default=1024, metavar="N", help="words, or ids, of a prompt [1024]")
    add("--random-output-len", type=int, default=128, metavar="N", help="tokens of an answer [128]")
    add("--random-range-ratio", type=float, default=0.0, metavar="F", help="lengths vary by this share [0]")
    add("--token-ids", action="store_true", help="prompts of random token ids, where the server takes them")
    add("--vocab-size", type=int, default=10_000, metavar="N", help="with --token-ids: ids stay below [10000]")
    add("--request-rate", type=rate, default=math.inf, metavar="F", help="arrivals a second; inf: all at once [inf]")
    add("--max-concurrency", type=int, metavar="N", help="requests open at once [no limit]")
    add("--client-processes", type=int, default=1, metavar="N", help="that send and read, where one is too slow [1]")
    add("--num-warmups", type=int, default=1, metavar="N", help="requests before the test, one by one [1]")
    add("--goodput", type=limit, nargs="+", default=[], metavar="NAME:MS", help=f"limits, of {', '.join(LIMITS)}")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="full-length answers, if known [on]")
    add("--temperature", type=float, default=0.0, metavar="F", help="0 is greedy [0]")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="further fields of every request")
    add("--seed", type=int, default=0, metavar="N", help="of arrivals, lengths and prompts [0]")
    add("--timeout", type=float, default=600.0, metavar="S", help="of one request [600]")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    add("--png", type=Path, metavar="FILE", help="draw the distributions and the course of the test (matplotlib)")


def run(args: argparse.Namespace) -> int:
    url = base_url(args.url)
    check(args)
    try:
        from ostinato.cli.bench.serve_measure import measure
    except ModuleNotFoundError as error:
        raise ConfigError(f"bench serve needs {error.name}: pip install 'ostinato[server]'") from None
    from ostinato.cli.bench import serve_plot, serve_report

    if args.png is not None:
        serve_plot.require_matplotlib()
    measured = measure(args, url)
    report = serve_report.make_report(args, measured)
    record.write(args.json, report)
    serve_report.print_report(report)
    if args.png is not None:
        serve_plot.draw(report, measured.outcomes, args.png)
    return 0 if report["summary"]["num_completed"] else 1


# -- values ------------------------------------------------------------------------------------------------------------


def base_url(text: str) -> str:
    """Without the path of the API, which may be given: `http://127.0.0.1:8000/v1/` and the same without `/v1/`."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"{text!r} is not the URL of a server, such as http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is neither inf nor a number of requests a second above 0")
    return value


def limit(text: str) -> tuple[str, float]:
    """`ttft:200`."""
    name, _, number = text.partition(":")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if name not in LIMITS or not value >= 0:
        shown = ", ".join(f"{name}:MS" for name in LIMITS)
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {shown} (the URL comes before --goodput)")
    return name, value


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError before anything is sent."""
    least = {"num_prompts": 1, "random_input_len": 1, "random_output_len": 1, "vocab_size": 2, "num_warmups": 0}
    options.require_least(args, client_processes=1, **least)
    if args.max_concurrency is not None:
        options.require_least(args, max_concurrency=1)
    most = args.num_prompts if args.max_concurrency is None else min(args.num_prompts, args.max_concurrency)
    if args.client_processes > most:
        raise ConfigError(f"--client-processes {args.client_processes}: there is work for {most} at most")
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio {args.random_range_ratio}: must be at least 0 and below 1")
    if not args.timeout > 0:
        raise ConfigError(f"--timeout {args.timeout}: must be above 0")
    if args.token_ids and args.endpoint == CHAT:
        raise ConfigError(f"--token-ids: chat messages are text; use --endpoint {COMPLETIONS}")
    options.require_folder(args.json)
    if args.png is not None and not args.png.resolve().parent.is_dir():
        raise ConfigError(f"--png {args.png}: there is no folder {args.png.resolve().parent}")
