"""Time to the first token by prompt length: from handing the prompts over to the one token that each asks for.

Tokens per second and TFLOP/s are those of the fastest run; the arithmetic is counted from the model's shape.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ostinato.cli.bench import options, record
from ostinato.cli.options import integers

if TYPE_CHECKING:
    from ostinato.cli.bench.subject import Subject

DEFAULT_LENGTHS = [128, 512, 2048]


def configure(parser: argparse.ArgumentParser) -> None:
    runs = "timings of each length, at least 3"
    options.configure(parser, "prefill", runs=3, runs_help=runs, max_num_seqs="the largest batch")
    shown = ",".join(map(str, DEFAULT_LENGTHS))
    lengths = f"random ids of each prompt [{shown}]"
    parser.add_argument("--prompt-len", type=integers, default=DEFAULT_LENGTHS, metavar="N,N", help=lengths)
    options.add_batch(parser, [1], "prompts at once")


def run(args: argparse.Namespace) -> int:
    base = options.base_options(args, args.batch)
    options.require_least(args, runs=3, prompt_len=1, batch=1)
    options.require_folder(args.json)
    from ostinato.cli.bench.subject import find_subject
    from ostinato.cli.bench.tpot import Prompts, generate_s
    from ostinato.cli.session import open_llm
    from ostinato.progress import bar

    subject = find_subject(args, base, max(args.prompt_len) + 1, "--prompt-len and the token that follows")
    prompts, rows = Prompts(subject.vocab_size), []
    cases = [(batch, length) for batch in args.batch for length in args.prompt_len]
    with open_llm(args.model, **subject.options) as llm, bar("measuring", len(cases)) as update:
        for batch, length in cases:
            generate_s(llm, prompts, batch, length, 1)
            times = [generate_s(llm, prompts, batch, length, 1) for _ in range(args.runs)]
            rows.append(_row(subject, batch, length, times))
            update(len(rows), f"batch {batch}, {length} tokens")
        stats = llm.stats()
    report = record.head("prefill", subject) | {
        "workload": {"num_runs": args.runs},
        "engine": record.engine_facts(stats),
        "timings": rows,
    }
    record.write(args.json, report)
    _print(report)
    return 0


def _row(subject: Subject, batch: int, prompt_len: int, times: list[float]) -> dict[str, Any]:
    from ostinato.cli.bench.accounting import prefill_flops

    flops, fastest = prefill_flops(subject.sizes.model_config, batch, prompt_len), min(times)
    return {
        "batch": batch,
        "prompt_len": prompt_len,
        "ttft_ms": record.spread([1e3 * seconds for seconds in times]),
        "tokens_per_s": batch * prompt_len / fastest,
        "flops": flops,
        "tflop_per_s": flops / fastest / 1e12,
    }


def _print(report: dict[str, Any]) -> None:
    from ostinato.cli.report import make_console, make_table

    console = make_console()
    record.print_head(report, console, f", mode {report['engine']['mode']}")
    table = make_table("batch", "prompt", "TTFT ms", "median", "spread", "tokens/s", "TFLOP/s")
    for row in report["timings"]:
        times = (f"{row['ttft_ms'][name]:.3f}" for name in ("min", "median", "spread"))
        rates = (f"{row['tokens_per_s']:,.0f}", f"{row['tflop_per_s']:.3g}")
        table.add_row(str(row["batch"]), str(row["prompt_len"]), *times, *rates)
    console.print(table)
