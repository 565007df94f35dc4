"""What recording costs: at the start, while requests run, and put off until it is asked for or until there is time.

Three engines, each in a process of its own: capture=eager, whose sizes and mode are then changed with requests running;
capture=lazy; capture=background.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ostinato.cli.bench import options, record
from ostinato.cli.parser import UsageError
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError
from ostinato.graphs.mode import CUDAGraphMode

if TYPE_CHECKING:
    from rich.console import Console

CASES = ("eager", "lazy", "background")
MAX_NUM_SEQS = 64
_LARGEST_SHOWN = 3


def configure(parser: argparse.ArgumentParser) -> None:
    options.configure(parser, "reconfigure", max_num_seqs=MAX_NUM_SEQS)
    options.add_batch(parser, [3, 8, 24], "batches whose first decode step meets no recording with capture=lazy")
    parser.add_argument("--running", type=int, default=8, metavar="N", help="requests that run at each change [8]")
    parser.add_argument("--prompt-len", type=int, default=32, metavar="N", help="random ids of each prompt [32]")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="decode steps around each change [16]")


def run(args: argparse.Namespace) -> int:
    base = {"max_num_seqs": MAX_NUM_SEQS} | options.base_options(args)
    if "capture" in base:
        raise UsageError("--capture: bench reconfigure goes through eager, lazy and background")
    options.require_least(args, batch=1, running=1, prompt_len=1, steps=1)
    most = max(*args.batch, args.running)
    if most > base["max_num_seqs"]:
        raise UsageError(f"--max-num-seqs {base['max_num_seqs']} is below {most}, of --batch or --running")
    options.require_folder(args.json)
    config = EngineConfig.from_options(args.model, base)
    if config.resolved_mode is CUDAGraphMode.NONE:
        raise ConfigError("nothing is recorded in mode NONE: leave out --enforce-eager, or take another mode")
    from ostinato.cli.bench.fresh import run_fresh
    from ostinato.cli.bench.subject import find_subject
    from ostinato.progress import bar

    changes = changes_of(config)
    # each prompt may wait for the others' to be run, and decodes a token a step meanwhile
    wanted = args.prompt_len + (len(changes) + 2) * (args.steps + 4) + most * args.prompt_len
    subject = find_subject(args, base, wanted, "--batch, --running, --prompt-len and --steps")
    job = {
        "what": "reconfigure",
        "model": args.model,
        "options": subject.options,
        "vocab_size": subject.vocab_size,
        "batches": args.batch,
        "running": args.running,
        "prompt_len": args.prompt_len,
        "steps": args.steps,
        "changes": changes,
    }
    results = {}
    with bar("measuring", len(CASES)) as update:
        for done, case in enumerate(CASES):
            update(done, f"capture={case}")
            results[case] = run_fresh(job | {"case": case})
        update(len(CASES), "")
    report = record.head("reconfigure", subject) | {
        "workload": {name: job[name] for name in ("batches", "running", "prompt_len", "steps")},
        **results,
    }
    record.write(args.json, report)
    _print(report)
    return 0


def changes_of(config: EngineConfig) -> list[dict[str, Any]]:
    """Other sizes and back, another mode and back. The other sizes lie between the powers of two."""
    tokens = config.max_num_batched_tokens
    between = [3 * 2**power for power in range(tokens.bit_length()) if 3 * 2**power < tokens]
    sizes = sorted({1, *between, config.max_num_seqs, tokens})
    own = config.cudagraph_capture_sizes
    back = own if own is None or isinstance(own, Mapping) else list(own)
    mode, both = config.resolved_mode, CUDAGraphMode.FULL_AND_PIECEWISE
    other = CUDAGraphMode.FULL if mode is both else both
    return [
        {"cudagraph_capture_sizes": sizes},
        {"cudagraph_capture_sizes": back},
        {"cudagraph_mode": other.value},
        {"cudagraph_mode": mode.value},
    ]


def work(job: dict[str, Any]) -> dict[str, Any]:
    """One engine, in the process that is its own."""
    from ostinato.cli.bench import reconfigure_measure as measure
    from ostinato.engine.llm import LLM

    by_case = {"eager": measure.eager_and_changes, "lazy": measure.lazy, "background": measure.background}
    return by_case[job["case"]](partial(LLM, job["model"]), job)


def _print(report: dict[str, Any]) -> None:
    from ostinato.cli.report import format_bytes, make_console, make_table

    console = make_console()
    eager, lazy, background = (report[case] for case in CASES)
    record.print_head(report, console, f", mode {eager['start']['mode']}")
    starts = make_table("capture", "ready s", "recordings", "to come", "recording s", "bytes", "all recorded s")
    for case in CASES:
        start = report[case]["start"]
        all_s = {"eager": start["ready_s"], "background": background["all_recorded_s"]}.get(case)
        starts.add_row(
            case,
            f"{start['ready_s']:.2f}",
            str(start["num_recordings"]),
            str(start["num_pending"]),
            f"{start['capture_s']:.2f}",
            format_bytes(start["recording_bytes"]),
            "-" if all_s is None else f"{all_s:.2f}",
        )
    console.print(starts)
    if background["num_not_recorded"]:
        console.print(f"capture=background left {background['num_not_recorded']} out: see the warnings")
    _print_keys(eager["start"]["recordings"], "capture=eager: the keys that took longest, and all", console)

    running = report["workload"]["running"]
    changes = make_table(
        *("change", "seconds", "pause ms", "recorded", "recording s", "bytes", "kept", "dropped", "preempted"),
        title=f"changes while {running} requests run",
    )
    for change in eager["changes"]:
        changes.add_row(
            _describe(change["options"]),
            f"{change['seconds']:.3f}",
            f"{change['pause_ms']:.1f}",
            str(len(change["recorded"])),
            f"{change['recording_s']:.3f}",
            format_bytes(change["recording_bytes"]),
            *(str(change[name]) for name in ("kept", "dropped", "preempted")),
        )
    console.print(changes)

    hits = make_table(
        *("batch", "first ms", "ran as", "slowest ms", "recording ms", "later ms", "runs as"),
        title="capture=lazy: decode steps before and after their key is recorded",
    )
    for hit in lazy["hits"]:
        hits.add_row(
            str(hit["batch"]),
            f"{hit['first_ms']:.2f}",
            f"{hit['first_mode']} ({hit['first_reason']})",
            f"{hit['slowest_ms']:.2f}",
            f"{1e3 * sum(line['seconds'] for line in hit['recorded']):.1f}",
            f"{hit['later_ms']['median']:.2f}",
            f"{hit['later_mode']} {hit['later_rows']} rows",
        )
    console.print(hits)


def _print_keys(recordings: Sequence[dict[str, Any]], title: str, console: Console) -> None:
    from ostinato.cli.bench.reconfigure_measure import median_ms
    from ostinato.cli.report import format_bytes, make_table

    table = make_table("mode", "tokens", "rows", "graphs", "nodes", "ms", "bytes", title=title)
    for line in sorted(recordings, key=lambda line: line["seconds"], reverse=True)[:_LARGEST_SHOWN]:
        counts = (str(line[name]) for name in ("num_tokens", "num_rows", "num_graphs", "num_nodes"))
        table.add_row(line["mode"], *counts, f"{1e3 * line['seconds']:.1f}", format_bytes(line["num_bytes"]))
    table.add_section()
    sums = (str(sum(line[name] for line in recordings)) for name in ("num_graphs", "num_nodes"))
    seconds = sum(line["seconds"] for line in recordings)
    size = format_bytes(sum(line["num_bytes"] for line in recordings))
    table.add_row("all", "", "", *sums, f"{1e3 * seconds:.1f}", size)
    console.print(table)
    console.print(f"median of a recording: {median_ms(recordings):.1f} ms")


def _describe(change: dict[str, Any]) -> str:
    ((name, value),) = change.items()
    if name == "cudagraph_mode":
        return f"mode {value}"
    return "the sizes of the start" if value is None else f"{len(value)} sizes, to {value[-1]}"
