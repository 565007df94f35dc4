"""The sizes to record with the least padding, from the steps of a server or a log.

SOURCE is the URL of a running server, a file with what its /metrics or its /graphs/steps said, or a file of batch
sizes: a line is `size`, `size,steps` or `mixed,size,steps`; sizes are requests, those of mixed batches tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from ostinato.cli.options import byte_size
from ostinato.cli.traffic import Traffic, read_traffic
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.graphs.ladder import Fit, fit
from ostinato.graphs.mode import CUDAGraphMode
from ostinato.graphs.tuning import TunedLadder, Tuning, interpolated, tune

_LIMITS = ("max_num_seqs", "max_num_batched_tokens")
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ostinato tune [OPTIONS] SOURCE"
    parser.add_argument("source", metavar="SOURCE", help="http://HOST:PORT of a server, or a file")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--max-sizes", type=int, metavar="K", help="recordings, all together [as many as the default ladders have]"
    )
    budget.add_argument("--max-bytes", metavar="SIZE", help="that recordings hold, all together, such as 500MiB")
    parser.add_argument(
        "--graph-bytes", metavar="SIZE", help="with --max-bytes: of one recording [what a server says of its own]"
    )
    parser.add_argument(
        "--seen-only", action="store_true", help="sizes that did not come may run eagerly once they do: least padding"
    )
    parser.add_argument("--cudagraph-mode", metavar="MODE", help=f"[a server's own, or {_DEFAULTS['cudagraph_mode']}]")
    for name in _LIMITS:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, metavar="N", help=f"[a server's own, or {_DEFAULTS[name]}]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found there")


def run(args: argparse.Namespace) -> int:
    for name in ("max_sizes", *_LIMITS):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if args.graph_bytes is not None and args.max_bytes is None:
        raise ConfigError("--graph-bytes says what --max-bytes is made of: give that too")
    if args.json is not None and not args.json.parent.is_dir():
        raise ConfigError(f"--json {args.json}: there is no folder {args.json.parent}")
    max_bytes = None if args.max_bytes is None else byte_size(args.max_bytes)
    graph_bytes = None if args.graph_bytes is None else byte_size(args.graph_bytes)
    if args.cudagraph_mode is not None:
        CUDAGraphMode.parse(args.cudagraph_mode)

    traffic = read_traffic(args.source)
    typed = {name: getattr(args, name) for name in ("cudagraph_mode", *_LIMITS) if getattr(args, name) is not None}
    config = {name: _DEFAULTS[name] for name in ("cudagraph_mode", *_LIMITS)} | traffic.config | typed
    if traffic.config.get("cudagraph_mode") == CUDAGraphMode.NONE.value and "cudagraph_mode" not in typed:
        config["cudagraph_mode"] = _DEFAULTS["cudagraph_mode"]  # a server without graphs still shows what they would do
    _check_limits(traffic, config)
    tuning = tune(
        traffic.counts,
        CUDAGraphMode.parse(config["cudagraph_mode"]),
        config["max_num_seqs"],
        config["max_num_batched_tokens"],
        max_sizes=args.max_sizes,
        max_bytes=max_bytes,
        bytes_of=None if max_bytes is None else _bytes_of(traffic, graph_bytes),
        cover=not args.seen_only,
    )
    if args.json is not None:
        args.json.write_text(json.dumps(_facts(args.source, config, tuning), indent=1) + "\n")
    _print(args.source, config, tuning)
    return 0


def _check_limits(traffic: Traffic, config: dict[str, Any]) -> None:
    for name, uniform in zip(_LIMITS, (True, False), strict=True):
        largest = max((line.size for line in traffic.counts if (line.query_len is not None) == uniform), default=0)
        # a server's own sizes are rounded up, and its limits may have changed meanwhile
        if not traffic.config and largest > config[name]:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"steps of {largest} were counted, above {name}={config[name]}: say {flag} as served")


def _bytes_of(traffic: Traffic, graph_bytes: int | None) -> Callable[[str, int], int]:
    """What a recording of a kind and size holds: as asked for, interpolated between those that exist, or their mean."""
    same = graph_bytes or traffic.mean_bytes
    if not same:
        raise ConfigError(
            "--max-bytes needs to know what a recording holds, which this source does not say: give --graph-bytes, or "
            "--max-sizes instead"
        )
    tables = {} if graph_bytes else {kind: interpolated(table) for kind, table in traffic.recording_bytes.items()}
    return lambda kind, size: tables[kind](size) if kind in tables else same


def _facts(source: str, config: dict[str, Any], tuning: Tuning) -> dict[str, Any]:
    def side(ladder: TunedLadder, sizes: tuple[int, ...]) -> dict[str, Any]:
        found = fit(ladder.demand, sizes)
        return {
            "sizes": list(sizes),
            "computed": found.work,
            "padding": round(found.padding, 6),
            "eager_steps": found.eager,
        }

    ladders = {}
    for ladder in tuning.ladders:
        counted = fit(ladder.demand, ladder.sizes)
        ladders[ladder.kind] = {
            "steps": counted.steps,
            "live": counted.live,
            "default": side(ladder, ladder.default),
            "tuned": side(ladder, ladder.sizes),
        }
    options = {"cudagraph_capture_sizes": tuning.sizes}
    return {"what": "tune", "source": source, **config, "ladders": ladders, "options": options}


def _print(source: str, config: dict[str, Any], tuning: Tuning) -> None:
    from ostinato.cli.report import make_console, make_table

    console = make_console()
    console.print(
        f"{source}: mode {config['cudagraph_mode']}, up to {config['max_num_seqs']} requests and "
        f"{config['max_num_batched_tokens']} tokens a step"
    )
    table = make_table("batches", "ladder", "sizes", "steps", "live", "computed", "padding", "eager steps")
    table.columns[1].justify = "left"
    for ladder in tuning.ladders:
        unit = "requests" if ladder.kind == "uniform" else "tokens"
        for name, sizes in (("default", ladder.default), ("tuned", ladder.sizes)):
            found = fit(ladder.demand, sizes)
            numbers = (len(sizes), found.steps, found.live, found.work)
            table.add_row(f"{ladder.kind}, {unit}", name, *(f"{n:,}" for n in numbers), *_shares(found))
    console.print(table)
    for ladder in tuning.ladders:
        if not ladder.demand.counts:
            console.print(f"no {ladder.kind} batch was counted: its default ladder stays")
    default, tuned = (
        sum(found.work - found.live for found in (fit(ladder.demand, sizes) for ladder, sizes in pairs))
        for pairs in (
            [(ladder, ladder.default) for ladder in tuning.ladders],
            [(ladder, ladder.sizes) for ladder in tuning.ladders],
        )
    )
    saved = f" ({1 - tuned / default:.1%} less)" if default else ""
    console.print(f"padding: {default:,} with the default ladders, {tuned:,} with these{saved}")
    typed = [",".join(map(str, tuning.sizes.get(kind, ()))) for kind in ("uniform", "mixed")]
    console.print(f"\n--cudagraph-capture-sizes {'/'.join(typed)}", soft_wrap=True)
    console.print(f"cudagraph_capture_sizes={json.dumps(tuning.sizes)}", soft_wrap=True)


def _shares(found: Fit) -> tuple[str, str]:
    return (f"{found.padding:.2%}" if found.steps else "-"), f"{found.eager:,}"
