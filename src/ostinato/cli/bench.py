"""Decode latency by CUDA graph mode and batch size, on this machine, with a new engine for each mode."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.cli.options import add_engine_options, engine_options, integers, words
from ostinato.cli.parser import UsageError
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.graphs.mode import CUDAGraphMode

if TYPE_CHECKING:
    from ostinato.cli.footprint import Footprint
    from ostinato.cli.tpot import Workload

DEFAULT_MODES = "NONE,PIECEWISE,FULL,FULL_AND_PIECEWISE"
MAX_CONTEXT = 4096
"""Model length where none is asked for: long prompts are not measured, and the split of attention depends on it."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ostinato bench modes [OPTIONS] MODEL"
    parser.add_argument("what", metavar="modes", choices=("modes",), help="what to measure: modes")
    add_engine_options(parser, max_num_seqs="the largest batch", enable_prefix_caching=False)
    parser.add_argument("--modes", type=words, default=words(DEFAULT_MODES), metavar="A,B", help=f"[{DEFAULT_MODES}]")
    parser.add_argument("--batch", type=integers, default=[1, 8, 64], metavar="1,8", help="batch sizes [1,8,64]")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="timings of each length, at least 3 [3]")
    parser.add_argument("--prompt-len", type=int, default=128, metavar="N", help="random ids of each prompt [128]")
    parser.add_argument("--output-len", type=int, default=129, metavar="N", help="tokens of the longer runs [129]")
    parser.add_argument("--bandwidth", type=float, metavar="TB/s", help="of reading memory: adds the floor of a step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")


def run(args: argparse.Namespace) -> int:
    base, modes = _base_options(args), [CUDAGraphMode.parse(mode) for mode in args.modes]
    _check(args)
    from ostinato.cli.footprint import footprint
    from ostinato.cli.tpot import Workload
    from ostinato.engine.build import resolve_device

    device = resolve_device(base.get("device"))
    base = _with_context(args, base)
    sizes = footprint(EngineConfig.from_options(args.model, base), device.type)
    workload = Workload(args.prompt_len, args.output_len, args.runs, sizes.model_config.vocab_size)
    results = [_measure_mode(args, base | {"cudagraph_mode": mode.value}, workload) for mode in modes]

    from ostinato.cli.environment import describe_environment

    floor_ms = sizes.read_bytes / (args.bandwidth * 1e9) if args.bandwidth else None
    report = {
        "benchmark": "modes",
        "command": shlex.join(["ostinato", *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": describe_environment(device),
        "model": {"name": args.model, "dtype": sizes.dtype, **dataclasses.asdict(sizes.model_config)},
        "engine_options": base,
        "workload": dataclasses.asdict(workload),
        "weight_bytes_per_step": sizes.read_bytes,
        "bandwidth_tb_s": args.bandwidth,
        "floor_ms": floor_ms,
        "results": results,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    _print(report, sizes)
    return 0


def _base_options(args: argparse.Namespace) -> dict[str, Any]:
    options = {"max_num_seqs": max(args.batch), "enable_prefix_caching": False} | engine_options(args)
    for name in ("cudagraph_mode", "enforce_eager"):
        if name in options:
            raise UsageError(f"--{name.replace('_', '-')}: bench modes goes through the modes in --modes")
    if options["enable_prefix_caching"]:
        raise UsageError("--enable-prefix-caching: a prompt found in the cache would spoil the time of its first token")
    return options


def _check(args: argparse.Namespace) -> None:
    for name, least in (("runs", 3), ("output_len", 2), ("prompt_len", 1)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    if min(args.batch) < 1:
        raise ConfigError(f"--batch {','.join(map(str, args.batch))}: sizes must be at least 1")
    if args.bandwidth is not None and not args.bandwidth > 0:
        raise ConfigError(f"--bandwidth {args.bandwidth}: must be above 0")
    if args.json is not None and not args.json.resolve().parent.is_dir():
        raise ConfigError(f"--json {args.json}: there is no folder {args.json.resolve().parent}")


def _with_context(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """With the model length set, and found long enough for the workload."""
    from ostinato.models.config import parse_config
    from ostinato.weights.checkpoint import open_checkpoint

    wanted = args.prompt_len + args.output_len
    if "max_model_len" not in options:
        checkpoint = open_checkpoint(args.model, options.get("load_format", "auto"))
        limit = parse_config(checkpoint.config).max_position_embeddings
        options = options | {"max_model_len": min(limit, max(MAX_CONTEXT, wanted))}
    if options["max_model_len"] < wanted:
        raise ConfigError(
            f"prompts of {args.prompt_len} and outputs of {args.output_len} tokens need a model length of {wanted}, "
            f"and it is {options['max_model_len']}: lower --prompt-len or --output-len"
        )
    return options


def _measure_mode(args: argparse.Namespace, options: dict[str, Any], workload: Workload) -> dict[str, Any]:
    from ostinato.cli.session import open_llm
    from ostinato.cli.tpot import measure, num_timings
    from ostinato.progress import bar

    mode = options["cudagraph_mode"]
    with open_llm(args.model, **options) as llm:
        with bar(f"measuring {mode}", num_timings(args.batch, workload)) as update:
            done = 0

            def on_run() -> None:
                nonlocal done
                done += 1
                update(done, "")

            timings = measure(llm, args.batch, workload, on_run)
        stats = llm.stats()
    return {
        "mode": mode,
        "backend": stats.backend,
        "capture_s": stats.capture_s,
        "num_recordings": stats.num_recordings,
        "recording_bytes": stats.recording_bytes,
        "startup_s": stats.startup_s,
        "timings": [dataclasses.asdict(timing) for timing in timings],
        "recordings": [dataclasses.asdict(recording) for recording in stats.recordings],
    }


def _print(report: dict[str, Any], sizes: Footprint) -> None:
    from ostinato.cli.report import format_bytes, make_console, make_table

    where, console = report["environment"], make_console()
    console.print(
        f"{report['model']['name']} ({sizes.dtype}) on {where['device_name'] or where['device']}, "
        f"torch {where['torch']}, triton {where['triton']}; "
        f"a decode step reads {format_bytes(sizes.read_bytes)} of weights"
        + (f", floor {report['floor_ms']:.3f} ms" if report["floor_ms"] else "")
    )
    columns = ("mode", "batch", "TPOT ms", "median", "spread", "TTFT ms", "runs as", "graphs", "eager", "nodes")
    table = make_table(*columns, *(["of floor"] if report["floor_ms"] else []))
    for result in report["results"]:
        for row in result["timings"]:
            times = (f"{row[name]:.3f}" for name in ("tpot_min_ms", "tpot_median_ms", "spread_ms", "ttft_ms"))
            counts = ("-" if row[n] is None else str(row[n]) for n in ("graph_launches", "eager_calls", "kernel_nodes"))
            share = [f"{report['floor_ms'] / row['tpot_min_ms']:.0%}"] if report["floor_ms"] else []
            table.add_row(result["mode"], str(row["batch"]), *times, row["runtime_mode"], *counts, *share)
        table.add_section()
    console.print(table)
    starts = make_table("mode", "recordings", "capture s", "bytes")
    for result in report["results"]:
        starts.add_row(
            result["mode"],
            str(result["num_recordings"]),
            f"{result['capture_s']:.2f}",
            format_bytes(result["recording_bytes"]),
        )
    console.print(starts)
