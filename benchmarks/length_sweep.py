"""Whether decode graphs pay at every context length: TPOT with and without them, and the time of recording.

    python benchmarks/length_sweep.py benchmarks/shapes/llama-1b --out FILE

Random weights for SHAPE's config.json. Each mode has a process and an engine of its own, which goes through all
`--contexts` at each of `--batches`: the prompts run, then `--rounds` times `--steps` steps are timed in which each
request gets one token. Prompts of a batch are ragged: 1, 17, n - 1 and n tokens in turn, the longest always among them.
The context given is that of the longest prompt; it grows with the tokens.

Recording is timed at each of `--recording-lens` as `max_model_len`, with the sizes that are recorded by default, in a
process each, since the first recording of a process pays for what later ones find. A process before them, not counted,
leaves compiled kernels in the cache.

Exit code 1 where the graph's median is more than 1.05 times the eager one at some length.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import sitting
from cases import CaseError, hand_over, run_case
from decoding import Decoding, UnexpectedError
from ostinato import LLM
from ostinato.cli.bench.record import engine_facts, portable, spread
from ostinato.cli.bench.tpot import Prompts, steps_between
from ostinato.cli.environment import describe_environment
from ostinato.errors import OstinatoError

GRAPH, EAGER = "FULL_AND_PIECEWISE", "NONE"
LIMIT = 1.05
"""Times the eager TPOT that the graph may take."""
SETTLE = 4
"""Steps before the first timed one: the pipeline is full."""
BLOCK = 16


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(words)
    if args.inside is not None:
        return inside(args)
    sitting_id = sitting.new_id()
    report: dict[str, Any] = {
        "benchmark": "length_sweep",
        "shape": args.shape.name,
        "command": shlex.join(["python", "benchmarks/length_sweep.py", *map(portable, words)]),
        "sitting": sitting.stamp(sitting_id),
        "workload": {name: getattr(args, name) for name in ("batches", "contexts", "steps", "rounds")},
        "limit": LIMIT,
        "modes": [],
        "recording": [],
        "ratios": [],
    }
    try:
        for mode in (GRAPH, EAGER):
            result = run_case(Path(__file__), words, mode)
            report["modes"].append({**result, "sitting": sitting.stamp(sitting_id)})
        report["ratios"] = ratios(*(result["timings"] for result in report["modes"]))
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        if args.recording_lens:
            run_case(Path(__file__), words, str(args.recording_lens[0]))
        for length in args.recording_lens:
            runs = [run_case(Path(__file__), words, str(length)) for _ in range(args.recording_runs)]
            report["recording"].append(
                {
                    "max_model_len": length,
                    "seconds": spread([run["engine"]["capture_s"] for run in runs]),
                    "runs": runs,
                    "sitting": sitting.stamp(sitting_id),
                }
            )
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    except CaseError as error:
        print(f"length_sweep: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines(report)))
    late = slower(report["ratios"])
    for line in late:
        print(f"length_sweep: {line}", file=sys.stderr)
    return 1 if late else 0


def prompt_lens(batch: int, context: int) -> list[int]:
    """Of the requests of a batch, the longest one last: 1, 17, n - 1, n, and again where there are more."""
    ragged = [1, 17, max(context - 1, 1), context]
    return [context] if batch == 1 else [ragged[(index - batch) % 4] for index in range(batch)]


def ratios(graph: list[dict[str, Any]], eager: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """TPOT of the graph over that of the eager step, medians, by batch and context. Raises ValueError where the two
    did not measure the same."""
    found = []
    for ours, theirs in zip(graph, eager, strict=True):
        place = {name: ours[name] for name in ("batch", "context")}
        if place != {name: theirs[name] for name in place}:
            raise ValueError(f"the modes measured different lengths: {place} and batch {theirs['batch']}")
        found.append(place | {"ratio": ours["tpot_ms"]["median"] / theirs["tpot_ms"]["median"]})
    return found


def slower(found: list[dict[str, Any]]) -> list[str]:
    """A line for each length at which the graph is the slower one by more than the limit."""
    return [
        f"batch {row['batch']}, context {row['context']}: the graph takes {row['ratio']:.3f} of the eager step's time, "
        f"more than {LIMIT}"
        for row in found
        if row["ratio"] > LIMIT
    ]


def inside(args: argparse.Namespace) -> int:
    """One mode, or one length to record at, in the process that is its own."""
    try:
        is_length = args.inside.isdecimal()
        hand_over(measure_recording(args, int(args.inside)) if is_length else measure_mode(args, args.inside))
    except (OstinatoError, UnexpectedError) as error:
        print(f"length_sweep: {error}", file=sys.stderr)
        return 1
    return 0


def measure_recording(args: argparse.Namespace, max_model_len: int) -> dict[str, Any]:
    options = _options(args, max_model_len) | {"num_gpu_blocks_override": 1 + -(-max_model_len // BLOCK)}
    with LLM(str(args.shape), **options) as llm:
        stats = llm.stats()
    return {
        "max_model_len": stats.max_model_len,
        "engine": engine_facts(stats),
        "num_graphs": sum(line.num_graphs for line in stats.recordings),
        "num_nodes": sum(line.num_nodes for line in stats.recordings),
    }


def measure_mode(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    most = max(args.batches)
    prefill = -(-most * max(args.contexts) // max(1, args.max_num_batched_tokens - most))
    max_tokens = prefill + most + 2 * SETTLE + args.rounds * args.steps
    max_model_len = max(args.contexts) + max(max_tokens, 17)
    options = _options(args, max_model_len) | {
        "cudagraph_mode": mode,
        "enable_prefix_caching": False,
        "max_num_seqs": most,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "num_gpu_blocks_override": 1 + most * -(-max_model_len // BLOCK),
        "cudagraph_capture_sizes": sorted(args.batches),  # no other step is timed
    }
    timings = []
    with LLM(str(args.shape), **options) as llm:
        device, vocab_size = llm.engine.runner.state.arena.device, llm.engine.runner.model.config.vocab_size
        for batch in args.batches:
            for context in args.contexts:
                timings.append(_measure(llm, args, batch, context, max_tokens, Prompts(vocab_size)))
        stats = llm.stats()
    if stats.preemptions:
        raise UnexpectedError(f"{stats.preemptions} requests were preempted: there are too few KV blocks")
    return {
        "mode": mode,
        "dtype": stats.dtype,
        "environment": describe_environment(device),
        "engine": engine_facts(stats),
        "max_model_len": stats.max_model_len,
        "timings": timings,
    }


def _measure(
    llm: LLM, args: argparse.Namespace, batch: int, context: int, max_tokens: int, prompts: Prompts
) -> dict[str, Any]:
    lens = prompt_lens(batch, context)
    decoding = Decoding(llm.engine, [prompts.draw(length) for length in lens], max_tokens)
    decoding.ticks(SETTLE)
    before = llm.stats().steps
    decoding.tick()  # asking for statistics took time of its own
    rounds = [decoding.ticks(args.steps) for _ in range(args.rounds)]
    ran = steps_between(before, llm.stats().steps)
    decoding.stop()
    eager = [step.key is None for step in ran]
    if any(eager) if args.inside == GRAPH else not all(eager):
        raise UnexpectedError(
            f"batch {batch}, context {context}: steps of mode {args.inside} ran as "
            f"{', '.join(sorted({step.mode for step in ran}))}"
        )
    return {
        "batch": batch,
        "context": context,
        "prompt_lens": lens,
        "tpot_ms": spread([statistics.fmean(times) * 1e3 for times in rounds]),
        "step_ms": spread([seconds * 1e3 for times in rounds for seconds in times]),
        "round_tpot_ms": [statistics.fmean(times) * 1e3 for times in rounds],
        "runs_as": sorted(step.mode if step.key is None else f"{step.mode} {step.key.name}" for step in ran),
    }


def _options(args: argparse.Namespace, max_model_len: int) -> dict[str, Any]:
    return {
        "load_format": "dummy",
        "device": args.device,
        "dtype": args.dtype,
        "max_model_len": max_model_len,
        "block_size": BLOCK,
    }


def lines(report: dict[str, Any]) -> list[str]:
    """Tables for people."""
    graph, eager = report["modes"]
    where = graph["environment"]
    told = [
        f"{report['shape']}, {graph['dtype']}, {where['device_name'] or where['device']}",
        f"{'batch':>5} {'context':>8} {'graph ms':>9} {'spread':>7} {'eager ms':>9} {'spread':>7} {'ratio':>6}  graph",
    ]
    for ours, theirs, row in zip(graph["timings"], eager["timings"], report["ratios"], strict=True):
        a, b = ours["tpot_ms"], theirs["tpot_ms"]
        told.append(
            f"{row['batch']:>5} {row['context']:>8} {a['median']:9.3f} {a['spread']:7.3f} {b['median']:9.3f} "
            f"{b['spread']:7.3f} {row['ratio']:6.3f}  {', '.join(ours['runs_as'])}"
        )
    if report["recording"]:
        told.append(
            f"{'max_model_len':>14} {'recording s':>12} {'spread':>7} {'recordings':>11} {'nodes':>7} {'MiB':>7}"
        )
    for row in report["recording"]:
        run, took = row["runs"][0], row["seconds"]
        told.append(
            f"{row['max_model_len']:>14} {took['median']:12.3f} {took['spread']:7.3f} "
            f"{run['engine']['num_recordings']:>11} {run['num_nodes']:>7} "
            f"{run['engine']['recording_bytes'] / (1 << 20):7.1f}"
        )
    return told


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, help="a folder with config.json")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", help="cpu or cuda; without it CUDA where it is")
    parser.add_argument("--dtype", default="bfloat16", help="[bfloat16]")
    parser.add_argument("--batches", type=_numbers, default=[1, 4], metavar="A,B", help="requests [1,4]")
    parser.add_argument(
        "--contexts",
        type=_numbers,
        default=[16, 1000, 4096, 16384, 32700],
        metavar="A,B",
        help="tokens of the longest prompt [16,1000,4096,16384,32700]",
    )
    parser.add_argument("--steps", type=int, default=30, help="of a round [30]")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="[8192]")
    parser.add_argument(
        "--recording-lens",
        type=_numbers,
        default=[1024, 4096, 32768],
        metavar="A,B",
        help="max_model_len to record at; empty for none [1024,4096,32768]",
    )
    parser.add_argument("--recording-runs", type=int, default=1, help="processes for each of them [1]")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main())
