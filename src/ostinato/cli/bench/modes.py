"""Time per output token by CUDA graph mode, place of the cut and batch size, each mode in a process of its own.

A process's first engine pays for memory and recordings that its later ones find there, so figures of one process for
all modes would make the last ones look cheap.
"""

from __future__ import annotations

import argparse
import dataclasses
from itertools import groupby
from operator import itemgetter
from typing import Any

from ostinato.cli.bench import options, record
from ostinato.cli.options import words
from ostinato.cli.parser import UsageError
from ostinato.errors import ConfigError
from ostinato.graphs.mode import LAYER_CUTS, CUDAGraphMode

DEFAULT_MODES = "NONE,PIECEWISE,FULL,FULL_AND_PIECEWISE"


def configure(parser: argparse.ArgumentParser) -> None:
    runs = "timings of each length, at least 3"
    options.configure(parser, "modes", runs=3, runs_help=runs, max_num_seqs="the largest batch")
    parser.add_argument("--modes", type=words, default=words(DEFAULT_MODES), metavar="A,B", help=f"[{DEFAULT_MODES}]")
    text = f"where each mode cuts a layer: {', '.join(LAYER_CUTS)} [--cudagraph-cut]"
    parser.add_argument("--cuts", type=words, metavar="A,B", help=text)
    options.add_batch(parser, [1, 8, 64])
    options.add_lengths(parser)
    options.add_bandwidth(parser)


def run(args: argparse.Namespace) -> int:
    base, modes = options.base_options(args, args.batch), [CUDAGraphMode.parse(mode) for mode in args.modes]
    for name in ("cudagraph_mode", "enforce_eager"):
        if name in base:
            raise UsageError(f"--{name.replace('_', '-')}: bench modes goes through the modes in --modes")
    if not modes:
        raise ConfigError("--modes names none")
    cuts = _cuts(args.cuts, base)
    options.require_least(args, runs=3, output_len=2, prompt_len=1, batch=1)
    options.require_folder(args.json)
    from ostinato.cli.bench.accounting import floor_ms, resolve_bandwidth
    from ostinato.cli.bench.fresh import run_fresh
    from ostinato.cli.bench.subject import find_subject
    from ostinato.cli.bench.tpot import Workload

    subject = find_subject(args, base, args.prompt_len + args.output_len, "--prompt-len and --output-len")
    workload = dataclasses.asdict(Workload(args.prompt_len, args.output_len, args.runs, subject.vocab_size))
    bandwidth = resolve_bandwidth(args.bandwidth, subject.device)
    job = {"what": "modes", "model": args.model, "batches": args.batch, "workload": workload}
    wanted = [{"cudagraph_cut": cut, "cudagraph_mode": mode.value} for cut in cuts for mode in modes]
    results = [run_fresh(job | {"options": subject.options | each}) for each in wanted]
    report = record.head("modes", subject) | {
        "workload": workload,
        "bandwidth_tb_s": bandwidth,
        "floor_ms": floor_ms(subject.sizes.read_bytes, bandwidth),
        "results": results,
    }
    record.write(args.json, report)
    _print(report)
    return 0


def _cuts(given: list[str] | None, base: dict[str, Any]) -> list[str]:
    """Those of `--cuts`, or the one of the engine's options."""
    if given is None:
        return [base.get("cudagraph_cut", LAYER_CUTS[0])]
    if "cudagraph_cut" in base:
        raise UsageError("--cudagraph-cut: bench modes goes through the cuts in --cuts")
    if not given or not set(given) <= set(LAYER_CUTS):
        raise ConfigError(f"--cuts {','.join(given)}: must be one or more of {', '.join(LAYER_CUTS)}")
    return given


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One mode and cut, in the process that is its own."""
    from ostinato.cli.bench.tpot import Prompts, Workload, measure_batch, num_timings
    from ostinato.cli.session import open_llm
    from ostinato.progress import bar

    workload, batches, mode = Workload(**job["workload"]), job["batches"], job["options"]["cudagraph_mode"]
    prompts = Prompts(workload.vocab_size)
    with open_llm(job["model"], **job["options"]) as llm:
        with bar(f"measuring {mode}", num_timings(batches, workload)) as update:
            done = 0

            def on_run() -> None:
                nonlocal done
                done += 1
                update(done, "")

            timings = [measure_batch(llm, batch, workload, prompts, on_run) for batch in batches]
        stats = llm.stats()
    return {
        **record.engine_facts(stats),
        "mode": mode,
        "cut": job["options"]["cudagraph_cut"],
        "timings": [dataclasses.asdict(timing) for timing in timings],
        "recordings": [dataclasses.asdict(recording) for recording in stats.recordings],
    }


def _print(report: dict[str, Any]) -> None:
    from ostinato.cli.report import format_bytes, make_console, make_table

    console, floor = make_console(), report["floor_ms"]
    further = f"; a decode step reads {format_bytes(report['weight_bytes_per_step'])} of weights"
    record.print_head(report, console, further + (f", floor {floor:.3f} ms" if floor else ""))
    columns = ("mode", "batch", "TPOT ms", "median", "spread", "TTFT ms", "runs as", "graphs", "eager", "nodes")
    for cut, results in groupby(report["results"], key=itemgetter("cut")):
        table = make_table(*columns, *(["of floor"] if floor else []), title=f"cut at {cut}")
        for result in results:
            for row in result["timings"]:
                times = (f"{row[name]:.3f}" for name in ("tpot_min_ms", "tpot_median_ms", "spread_ms", "ttft_ms"))
                numbers = (row[name] for name in ("graph_launches", "eager_calls", "kernel_nodes"))
                counts = ("-" if number is None else str(number) for number in numbers)
                share = [f"{floor / row['tpot_min_ms']:.0%}"] if floor else []
                table.add_row(result["mode"], str(row["batch"]), *times, row["runtime_mode"], *counts, *share)
            table.add_section()
        console.print(table)
    starts = make_table("mode", "cut", "recordings", "capture s", "bytes")
    for result in report["results"]:
        size = format_bytes(result["recording_bytes"])
        seconds = f"{result['capture_s']:.2f}"
        starts.add_row(result["mode"], result["cut"], str(result["num_recordings"]), seconds, size)
    console.print(starts)
