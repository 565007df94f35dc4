"""What an FP8 KV cache makes of the time of a decode step: formats in turn, in one sitting.

    python benchmarks/fp8_decode.py benchmarks/shapes/llama-8b --out FILE

Random weights for SHAPE's config.json. Each format has a process of its own: `--batch` prompts of `--prompt-len` random
ids run, then `--rounds` times `--steps` steps are timed in which each request gets one token. (`ostinato bench decode`
takes the difference of two whole outputs, which is no decode time where the prompts take as many steps as the output:
the first requests would be over before the last begin.) The context differs between requests by the steps that the
prompts took; what is given is the mean. Weights count once for the bytes of a step, keys and values with their scales
for each request at the mean context.
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
from ostinato.cli.bench.accounting import decode_bytes
from ostinato.cli.bench.record import engine_facts, portable, spread
from ostinato.cli.bench.tpot import Prompts, steps_between
from ostinato.cli.environment import describe_environment
from ostinato.cli.footprint import footprint
from ostinato.config import EngineConfig
from ostinato.errors import OstinatoError

SETTLE = 4
"""Steps before the first timed one: the pipeline is full."""


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(words)
    if args.inside is not None:
        return inside(args)
    sitting_id = sitting.new_id()
    report: dict[str, Any] = {
        "benchmark": "fp8_decode",
        "shape": args.shape.name,
        "command": shlex.join(["python", "benchmarks/fp8_decode.py", *map(portable, words)]),
        "sitting": sitting.stamp(sitting_id),
        "workload": {name: getattr(args, name) for name in ("batch", "prompt_len", "steps", "rounds")},
        "results": [],
    }
    for case in args.cases:
        try:
            result = {"case": case, **run_case(Path(__file__), words, case), "sitting": sitting.stamp(sitting_id)}
        except CaseError as error:
            print(f"fp8_decode: {error}", file=sys.stderr)
            return 1
        first = (report["results"] or [result])[0]
        result["ratio"] = result["tpot_ms"]["median"] / first["tpot_ms"]["median"]
        result["bytes_ratio"] = result["read_bytes"] / first["read_bytes"]
        report["results"].append(result)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(lines(report)))
    return 0


def inside(args: argparse.Namespace) -> int:
    """One format, in the process that is its own."""
    try:
        hand_over(measure(args))
    except (OstinatoError, UnexpectedError) as error:
        print(f"fp8_decode: {error}", file=sys.stderr)
        return 1
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    prefill = -(-args.batch * args.prompt_len // max(1, args.max_num_batched_tokens - args.batch))
    max_tokens = prefill + args.batch + 2 * SETTLE + args.rounds * args.steps
    options: dict[str, Any] = {
        "load_format": "dummy",
        "device": args.device,
        "dtype": args.dtype,
        "kv_cache_dtype": args.inside,
        "enable_prefix_caching": False,
        "max_model_len": max(args.max_model_len, args.prompt_len + max_tokens),
        "max_num_seqs": args.batch,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "cudagraph_capture_sizes": [args.batch],  # no other step is timed
    }
    with LLM(str(args.shape), **options) as llm:
        device = llm.engine.runner.state.arena.device
        sizes = footprint(EngineConfig.from_options(str(args.shape), options), device.type)
        prompts = Prompts(sizes.model_config.vocab_size)
        decoding = Decoding(llm.engine, [prompts.draw(args.prompt_len) for _ in range(args.batch)], max_tokens)
        decoding.ticks(SETTLE)
        before, first = llm.stats(), decoding.mean_context()
        decoding.tick()  # asking for statistics took time of its own
        rounds = [decoding.ticks(args.steps) for _ in range(args.rounds)]
        context, stats = (first + decoding.mean_context()) / 2, llm.stats()
        decoding.stop()
    if stats.preemptions:
        raise UnexpectedError(f"{stats.preemptions} requests were preempted: there are too few KV blocks")
    tpot = spread([statistics.fmean(times) * 1e3 for times in rounds])
    num_bytes = decode_bytes(sizes, args.batch, context)
    return {
        "dtype": stats.dtype,
        "kv_cache_dtype": stats.kv_cache_dtype,
        "environment": describe_environment(device),
        "engine": engine_facts(stats),
        "max_model_len": stats.max_model_len,
        "tpot_ms": tpot,
        "step_ms": spread([seconds * 1e3 for times in rounds for seconds in times]),
        "round_tpot_ms": [statistics.fmean(times) * 1e3 for times in rounds],
        "mean_context": context,
        "read_bytes": num_bytes,
        "kv_bytes_per_token": sizes.kv_token_bytes,
        "read_tb_s": num_bytes / tpot["median"] / 1e9,
        "runs_as": sorted(
            step.mode if step.key is None else f"{step.mode} {step.key.name}"
            for step in steps_between(before.steps, stats.steps)
        ),
    }


def lines(report: dict[str, Any]) -> list[str]:
    """A table for people."""
    work, first = report["workload"], report["results"][0]
    where = first["environment"]
    told = [
        f"{report['shape']}, {first['dtype']}, {where['device_name'] or where['device']}: {work['batch']} requests, "
        f"context {first['mean_context']:.0f}",
        f"{'KV cache':<14} {'TPOT ms':>9} {'least':>9} {'most':>9} {'GB read':>8} {'TB/s':>6} {'ratio':>6}  bytes",
    ]
    for row in report["results"]:
        took = row["tpot_ms"]
        told.append(
            f"{row['kv_cache_dtype']:<14} {took['median']:9.3f} {took['min']:9.3f} {took['max']:9.3f} "
            f"{row['read_bytes'] / 1e9:8.2f} {row['read_tb_s']:6.2f} {row['ratio']:6.3f} {row['bytes_ratio']:6.3f}  "
            f"{', '.join(row['runs_as'])}"
        )
    return told


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, help="a folder with config.json")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", help="cpu or cuda; without it CUDA where it is")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cases", type=_words, default=["auto", "fp8"], metavar="A,B", help="[auto,fp8]")
    parser.add_argument("--batch", type=int, default=256, help="requests [256]")
    parser.add_argument("--prompt-len", type=int, default=1024, help="tokens of their prompts [1024]")
    parser.add_argument("--steps", type=int, default=50, help="of a round [50]")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
    parser.add_argument("--max-model-len", type=int, default=4096, help="at least [4096]")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="[2048]")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main())
