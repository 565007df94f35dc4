"""Many requests of mixed lengths, handed over at once: tokens per second until the last one is done.

Lengths of prompts and outputs are uniform, prompts are random ids, sampled without a stop and without text. The same
requests run once more than counted, first, to warm up.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ostinato.cli.bench import options, record
from ostinato.errors import ConfigError
from ostinato.request import SamplingParams

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM
    from ostinato.graphs.dispatch import StepCount


def configure(parser: argparse.ArgumentParser) -> None:
    options.configure(parser, "throughput", runs=1, runs_help="runs that count, after the one that warms up")
    parser.add_argument("--num-prompts", type=int, default=256, metavar="N", help="requests [256]")
    parser.add_argument("--min-len", type=int, default=100, metavar="N", help="fewest tokens in, and out [100]")
    parser.add_argument("--max-len", type=int, default=1024, metavar="N", help="most tokens in, and out [1024]")
    parser.add_argument("--temperature", type=float, default=0.6, metavar="F", help="0 is greedy [0.6]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths and prompts [0]")


def run(args: argparse.Namespace) -> int:
    base = options.base_options(args)
    options.require_least(args, runs=1, num_prompts=1, min_len=1)
    if args.max_len < args.min_len:
        raise ConfigError(f"--max-len {args.max_len} is below --min-len {args.min_len}")
    options.require_folder(args.json)
    from ostinato.cli.bench.subject import find_subject
    from ostinato.cli.bench.tpot import Prompts
    from ostinato.cli.session import open_llm
    from ostinato.progress import bar

    subject = find_subject(args, base, 2 * args.max_len, "prompts and outputs of --max-len tokens")
    lengths = draw_lengths(args.num_prompts, args.min_len, args.max_len, args.seed)
    prompts = Prompts(subject.vocab_size, args.seed)
    inputs = [prompts.draw(num_in) for num_in, _ in lengths]
    params = [
        SamplingParams(temperature=args.temperature, ignore_eos=True, max_tokens=num_out, detokenize=False)
        for _, num_out in lengths
    ]
    results = []
    with open_llm(args.model, **subject.options) as llm, bar("measuring", 1 + args.runs) as update:
        for done in range(1 + args.runs):
            update(done, "" if done else "warm-up")
            results.append(_timed(llm, inputs, params))
        stats = llm.stats()
    num_in, num_out = (sum(each) for each in zip(*lengths, strict=True))
    times = [result["time_s"] for result in results[1:]]
    workload = {name: getattr(args, name) for name in ("num_prompts", "min_len", "max_len", "temperature", "seed")}
    report = record.head("throughput", subject) | {
        "workload": workload | {"num_runs": args.runs, "prompt_tokens": num_in, "output_tokens": num_out},
        "engine": record.engine_facts(stats),
        "output_tokens_per_s": record.spread([num_out / seconds for seconds in times]),
        "total_tokens_per_s": record.spread([(num_in + num_out) / seconds for seconds in times]),
        "warm_up": results[0],
        "results": results[1:],
    }
    record.write(args.json, report)
    _print(report)
    return 0


def draw_lengths(num_prompts: int, least: int, most: int, seed: int) -> list[tuple[int, int]]:
    """(tokens in, tokens out) of every request. `benchmarks/peer_vllm.py` draws the same."""
    rng = random.Random(seed)
    return [(rng.randint(least, most), rng.randint(least, most)) for _ in range(num_prompts)]


def _timed(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> dict[str, Any]:
    from ostinato.cli.bench.tpot import steps_between

    before = llm.stats()
    start = time.perf_counter()
    llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    after = llm.stats()
    return {
        "time_s": seconds,
        "preemptions": after.preemptions - before.preemptions,
        "steps": by_mode(steps_between(before.steps, after.steps)),
    }


def by_mode(steps: Sequence[StepCount]) -> list[dict[str, Any]]:
    """Steps, and the mean of the tokens that a step was asked for and of those it computed, for each runtime mode."""
    rows = []
    for mode in sorted({step.mode for step in steps}):
        of_mode = [step for step in steps if step.mode == mode]
        count = sum(step.count for step in of_mode)
        live, padded = sum(step.live_tokens for step in of_mode), sum(step.padded_tokens for step in of_mode)
        rows.append(
            {"mode": mode, "steps": count, "mean_live_tokens": live / count, "mean_padded_tokens": padded / count}
        )
    return rows


def _print(report: dict[str, Any]) -> None:
    from ostinato.cli.report import make_console, make_table

    console, work = make_console(), report["workload"]
    record.print_head(report, console, f", mode {report['engine']['mode']}")
    console.print(
        f"{work['num_prompts']} requests, {work['prompt_tokens']:,} tokens in and {work['output_tokens']:,} out "
        f"({work['min_len']} to {work['max_len']} each), temperature {work['temperature']}"
    )
    table = make_table("tokens/s", "fastest", "median", "spread")
    for title, name in (("output", "output_tokens_per_s"), ("all", "total_tokens_per_s")):
        table.add_row(title, *(f"{report[name][which]:,.0f}" for which in ("max", "median", "spread")))
    console.print(table)
    last = report["results"][-1]
    steps = make_table("mode", "steps", "live tokens a step", "padded")
    for row in last["steps"]:
        means = (f"{row['mean_live_tokens']:.1f}", f"{row['mean_padded_tokens']:.1f}")
        steps.add_row(row["mode"], str(row["steps"]), *means)
    console.print(steps)
    console.print(f"{last['preemptions']} preemptions, {last['time_s']:.2f} s (last run)")
