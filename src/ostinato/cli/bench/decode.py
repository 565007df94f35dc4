"""Time per output token by batch size: the time of a long output less the time of one token, by the tokens between.

Beside it: the bytes that a step must read and the time that takes at the bandwidth of --bandwidth, the share of the
time that the GPU stands still between steps, and the host's work per step. The last two come from a run of their own,
as observing costs time.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from ostinato.cli.bench import options, record

if TYPE_CHECKING:
    from ostinato.cli.bench.steps import StepCost
    from ostinato.cli.bench.tpot import Timing, Workload
    from ostinato.cli.footprint import Footprint
    from ostinato.engine.llm import LLM


def configure(parser: argparse.ArgumentParser) -> None:
    runs = "timings of each length, at least 3"
    options.configure(parser, "decode", runs=3, runs_help=runs, max_num_seqs="the largest batch")
    options.add_batch(parser, [1, 8, 64])
    options.add_lengths(parser)
    options.add_bandwidth(parser)


def run(args: argparse.Namespace) -> int:
    base = options.base_options(args, args.batch)
    options.require_least(args, runs=3, output_len=2, prompt_len=1, batch=1)
    options.require_folder(args.json)
    from ostinato.cli.bench.accounting import resolve_bandwidth
    from ostinato.cli.bench.subject import find_subject
    from ostinato.cli.bench.tpot import Workload
    from ostinato.cli.session import open_llm

    subject = find_subject(args, base, args.prompt_len + args.output_len, "--prompt-len and --output-len")
    workload = Workload(args.prompt_len, args.output_len, args.runs, subject.vocab_size)
    bandwidth = resolve_bandwidth(args.bandwidth, subject.device)
    with open_llm(args.model, **subject.options) as llm:
        rows = _measure(llm, args.batch, workload, subject.sizes, bandwidth)
        stats = llm.stats()
    report = record.head("decode", subject) | {
        "workload": dataclasses.asdict(workload),
        "bandwidth_tb_s": bandwidth,
        "engine": record.engine_facts(stats),
        "timings": rows,
    }
    record.write(args.json, report)
    _print(report)
    return 0


def _measure(
    llm: LLM, batches: list[int], workload: Workload, sizes: Footprint, bandwidth: float | None
) -> list[dict[str, Any]]:
    from ostinato.cli.bench.steps import step_cost, watching
    from ostinato.cli.bench.tpot import Prompts, generate_s, measure_batch, num_timings
    from ostinato.progress import bar

    prompts, rows = Prompts(workload.vocab_size), []
    with bar("measuring", num_timings(batches, workload) + len(batches)) as update:
        done = 0

        def on_run() -> None:
            nonlocal done
            done += 1
            update(done, f"batch {batch}")

        for batch in batches:
            timing = measure_batch(llm, batch, workload, prompts, on_run)
            with watching(llm, batch) as watch:
                generate_s(llm, prompts, batch, workload.prompt_len, workload.output_len)
            on_run()
            rows.append(_row(timing, step_cost(watch.steps()), workload, sizes, bandwidth))
    return rows


def _row(
    timing: Timing, cost: StepCost | None, workload: Workload, sizes: Footprint, bandwidth: float | None
) -> dict[str, Any]:
    from ostinato.cli.bench.accounting import decode_bytes, floor_ms, mean_context

    context = mean_context(workload.prompt_len, workload.output_len)
    num_bytes = decode_bytes(sizes, timing.batch, context)
    floor = floor_ms(num_bytes, bandwidth)
    return {
        **dataclasses.asdict(timing),
        "mean_context": context,
        "read_bytes": num_bytes,
        "floor_ms": floor,
        "floor_share": None if floor is None else floor / timing.tpot_min_ms,
        "host_us": None if cost is None else cost.host_us,
        "idle_us": None if cost is None else cost.idle_us,
        "idle_share": None if cost is None else cost.idle_share,
        "num_observed_steps": 0 if cost is None else cost.num_steps,
    }


def _print(report: dict[str, Any]) -> None:
    from ostinato.cli.report import format_bytes, make_console, make_table

    console = make_console()
    rate = report["bandwidth_tb_s"]
    record.print_head(report, console, f", mode {report['engine']['mode']}" + (f", {rate} TB/s" if rate else ""))
    times = ("TPOT ms", "median", "spread", "TTFT ms")
    table = make_table("batch", *times, "runs as", "reads", "floor ms", "of floor", "GPU idle", "host us")
    for row in report["timings"]:
        values = (f"{row[name]:.3f}" for name in ("tpot_min_ms", "tpot_median_ms", "spread_ms", "ttft_ms"))
        floor = ("-", "-") if row["floor_ms"] is None else (f"{row['floor_ms']:.3f}", f"{row['floor_share']:.0%}")
        idle = "-" if row["idle_share"] is None else f"{row['idle_share']:.1%}"
        host = "-" if row["host_us"] is None else f"{row['host_us']:.0f}"
        reads = format_bytes(row["read_bytes"])
        table.add_row(str(row["batch"]), *values, row["runtime_mode"], reads, *floor, idle, host)
    console.print(table)
