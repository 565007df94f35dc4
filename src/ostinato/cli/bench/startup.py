"""From the start of a process to its first token, part by part, in a fresh process for every run.

The first run may be slower than those after it: it fills the caches of files and of compiled kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

from ostinato.cli.bench import options, record

_LARGEST_SHOWN = 3


def configure(parser: argparse.ArgumentParser) -> None:
    options.configure(parser, "startup", runs=3, runs_help="processes to start")
    parser.add_argument("--prompt-len", type=int, default=128, metavar="N", help="random ids of the prompt [128]")


def run(args: argparse.Namespace) -> int:
    base = options.base_options(args)
    options.require_least(args, runs=1, prompt_len=1)
    options.require_folder(args.json)
    from ostinato.cli.bench.fresh import run_fresh
    from ostinato.cli.bench.subject import find_subject
    from ostinato.progress import bar

    subject = find_subject(args, base, args.prompt_len + 1, "--prompt-len and the token that follows")
    job = {"what": "startup", "model": args.model, "options": subject.options, "prompt_len": args.prompt_len}
    results = []
    with bar("starting", args.runs) as update:
        for done in range(args.runs):
            results.append(run_fresh(job | {"vocab_size": subject.vocab_size}))
            update(done + 1, f"{results[-1]['first_token_s']:.1f} s")
    first_token = record.spread([result["first_token_s"] for result in results])
    recordings = [result.pop("recordings") for result in results]
    usual = min(range(args.runs), key=lambda run: abs(results[run]["first_token_s"] - first_token["median"]))
    report = record.head("startup", subject) | {
        "workload": {"num_runs": args.runs, "prompt_len": args.prompt_len},
        "first_token_s": first_token,
        "parts_s": {
            part: record.spread([result["parts_s"][part] for result in results]) for part in results[0]["parts_s"]
        },
        "results": results,
        "usual_run": usual,
        "recordings": recordings[usual],
    }
    record.write(args.json, report)
    _print(report)
    return 0


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One start, in the process that it is measured from. Seconds on the clock that all processes share."""
    entered = time.monotonic()
    from ostinato.cli.bench.tpot import Prompts, generate_s
    from ostinato.engine.llm import LLM

    imported = time.monotonic()
    with LLM(job["model"], **job["options"]) as llm:
        ready = time.monotonic()
        generate_s(llm, Prompts(job["vocab_size"]), 1, job["prompt_len"], 1)
        done = time.monotonic()
        stats = llm.stats()
    parts = {"interpreter": entered - job["started_at"], "import": imported - entered, **stats.startup_s}
    parts |= {"other": ready - imported - sum(stats.startup_s.values()), "first token": done - ready}
    sizes = [recording.num_bytes for recording in stats.recordings]
    largest = max(sizes, default=0)
    return {
        "first_token_s": done - job["started_at"],
        "ready_s": ready - job["started_at"],
        "parts_s": parts,
        **record.engine_facts(stats),
        "largest_recording_bytes": largest,
        "bytes_over_largest": sum(sizes) / largest if largest else None,
        "recordings": [dataclasses.asdict(recording) for recording in stats.recordings],
    }


def _print(report: dict[str, Any]) -> None:
    from ostinato.cli.report import format_bytes, make_console, make_table

    console = make_console()
    record.print_head(report, console)
    table = make_table("part", "fastest s", "median", "spread")
    for part, seconds in report["parts_s"].items():
        table.add_row(part, *(f"{seconds[name]:.3f}" for name in ("min", "median", "spread")))
    table.add_section()
    whole = report["first_token_s"]
    table.add_row("process start to first token", *(f"{whole[name]:.3f}" for name in ("min", "median", "spread")))
    console.print(table)

    usual, recordings = report["results"][report["usual_run"]], report["recordings"]
    ratio = usual["bytes_over_largest"]
    kept = format_bytes(usual["recording_bytes"])
    console.print(
        f"{usual['num_recordings']} recordings in {usual['capture_s']:.2f} s keep {kept}"
        + (f", {ratio:.2f} times what the largest of them took" if ratio is not None else "")
    )
    if not recordings:
        return
    keys = make_table("mode", "tokens", "rows", "graphs", "nodes", "ms", "bytes", title="largest recordings, and all")
    by_size = sorted(recordings, key=lambda row: (row["num_bytes"], row["num_tokens"]), reverse=True)
    for row in by_size[:_LARGEST_SHOWN]:
        counts = (str(row[name]) for name in ("num_tokens", "num_rows", "num_graphs", "num_nodes"))
        keys.add_row(row["mode"], *counts, f"{1e3 * row['seconds']:.1f}", format_bytes(row["num_bytes"]))
    keys.add_section()
    sums = [sum(row[name] for row in by_size) for name in ("num_graphs", "num_nodes")]
    middle = statistics.median(row["seconds"] for row in by_size)
    total = f"{1e3 * usual['capture_s']:.1f}"
    keys.add_row("all", "", "", *map(str, sums), total, format_bytes(usual["recording_bytes"]))
    console.print(keys)
    console.print(f"median of a recording: {1e3 * middle:.1f} ms")
