"""Whether the parts of the memory table add up to what the device says, by share of the device.

    python benchmarks/memory.py benchmarks/shapes/llama-1b benchmarks/shapes/qwen3-0.6b benchmarks/shapes/llama-8b \\
        --out FILE

Random weights for each SHAPE's config.json, default options but for `gpu_memory_utilization`, each case in a process of
its own, since libraries are only loaded once. `stats().memory` is taken at the start and after `--num-prompts`
requests; after closing the device alone is asked. Each time it is idle and torch's allocator has given up what it held
back for the next eager step (`torch_cache`), which is no part of the table.

Exit code 1 where a case failed, or where the device has in use more than 64 MiB more or less than the parts add up to.
CUDA only: nothing says what the process may have of the CPU's memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

import sitting
from cases import CaseError, hand_over, run_case
from ostinato import LLM, SamplingParams
from ostinato.cli.bench.record import engine_facts, portable
from ostinato.cli.bench.tpot import Prompts
from ostinato.cli.environment import describe_environment
from ostinato.engine.stats import MemoryStat, RecordingStat
from ostinato.errors import OstinatoError
from ostinato.runner.memory import DeviceMemory, device_memory

LIMIT_BYTES = 64 << 20
"""Of `unaccounted`, either way: what the budget leaves for rounding."""
PARTS = ("before", "weights", "kv", "graphs", "buffers", "libraries")
"""Of what is in use; activations come and go."""
MOMENTS = ("start", "served")
MIB = 1 << 20


class NoTableError(RuntimeError):
    """There is no device that says what is in use."""


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(words)
    try:
        device = require_cuda(args.device)
        if args.inside is not None:
            hand_over(measure(args, device))
            return 0
    except (NoTableError, OstinatoError) as error:
        print(f"memory: {error}", file=sys.stderr)
        return 1
    sitting_id = sitting.new_id()
    report: dict[str, Any] = {
        "benchmark": "memory",
        "command": shlex.join(["python", "benchmarks/memory.py", *map(portable, words)]),
        "sitting": sitting.stamp(sitting_id),
        "workload": {name: getattr(args, name) for name in ("num_prompts", "prompt_len", "output_len")},
        "limit_bytes": LIMIT_BYTES,
        "results": [],
    }
    for index, shape in enumerate(args.shapes):
        for utilization in args.utilization:
            case = {"shape": shape.name, "gpu_memory_utilization": utilization}
            try:
                case |= run_case(Path(__file__), words, f"{index}@{utilization}")
            except CaseError as error:
                case["error"] = str(error)
            report["results"].append(case | {"sitting": sitting.stamp(sitting_id)})
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(lines(report)))
    found = faults(report["results"])
    for line in found:
        print(f"memory: {line}", file=sys.stderr)
    return 1 if found else 0


def require_cuda(name: str | None) -> torch.device:
    """Raises NoTableError where there is no such device, or where it is the CPU."""
    device = torch.device(name or "cuda")
    if device.type != "cuda":
        raise NoTableError(
            f"there is nothing to add up on {device}: total and free are only known of a CUDA device "
            "(stats().memory has None for them)"
        )
    if not torch.cuda.is_available():
        raise NoTableError("there is no CUDA device here, and only of one are total and free known")
    return device


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One case, in the process that is its own."""
    index, utilization = args.inside.split("@")
    context = _device(device)  # its own context, and whoever else is there
    began = time.perf_counter()
    with LLM(
        str(args.shapes[int(index)]),
        load_format="dummy",
        device=str(device),
        gpu_memory_utilization=float(utilization),
    ) as llm:
        start_s = time.perf_counter() - began
        start, prompts = snapshot(llm, device), Prompts(llm.engine.runner.model.config.vocab_size)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=args.output_len, detokenize=False)
        llm.generate([prompts.draw(args.prompt_len) for _ in range(args.num_prompts)], params)
        served, stats = snapshot(llm, device), llm.stats()
    del llm
    gc.collect()
    closed = _device(device)
    return {
        "dtype": stats.dtype,
        "environment": describe_environment(device),
        "engine": engine_facts(stats),
        "max_model_len": stats.max_model_len,
        "max_num_seqs": stats.max_num_seqs,
        "kv_tokens": (stats.num_blocks - 1) * stats.block_size,  # one block is scratch
        "preemptions": stats.preemptions,
        "start_s": start_s,
        "largest_recording": largest(stats.recordings),
        "start": start,
        "served": served,
        "closed": {
            "used_before": context.used,
            "used": closed.used,
            "retained": closed.used - context.used,
        },
    }


def snapshot(llm: LLM, device: torch.device) -> dict[str, Any]:
    """The table with the device idle and nothing held back, and what torch's allocator held back until then."""
    cache = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    _device(device)
    return add_up(llm.stats().memory) | {"torch_cache": cache}


def _device(device: torch.device) -> DeviceMemory:
    now = device_memory(device, trim=True)
    assert now is not None, "a CUDA device"
    return now


def add_up(memory: MemoryStat) -> dict[str, Any]:
    """The table in bytes: parts, their sum, what the device has in use, and the difference. Raises NoTableError where
    the device does not say."""
    if memory.total is None or memory.free is None or memory.before is None:
        raise NoTableError("the device does not say what is in use: there is nothing to add up to")
    parts = {name: getattr(memory, name) for name in PARTS}
    used, total = memory.total - memory.free, sum(parts.values())
    return {
        "parts": parts,
        "sum": total,
        "used": used,
        "unaccounted": used - total,
        "activations": memory.activations,
        "total": memory.total,
        "used_share": used / memory.total,
    }


def largest(recordings: tuple[RecordingStat, ...]) -> dict[str, Any] | None:
    """By bytes. The first one of a mode also paid for the pool. None without recordings."""
    if not recordings:
        return None
    most = max(recordings, key=lambda line: line.num_bytes)
    return {"mode": most.mode, "num_tokens": most.num_tokens, "query_len": most.query_len, "bytes": most.num_bytes}


def faults(results: list[dict[str, Any]]) -> list[str]:
    """A line for each case that failed or does not add up."""
    found = []
    for row in results:
        case = f"{row['shape']} at {row['gpu_memory_utilization']}"
        if "error" in row:
            found.append(f"{case}: {row['error']}")
            continue
        for moment in MOMENTS:
            used, total, left = (row[moment][name] / MIB for name in ("used", "sum", "unaccounted"))
            if abs(left) * MIB > LIMIT_BYTES:
                found.append(
                    f"{case}, {moment}: the device has {used:,.0f} MiB in use, the parts add up to {total:,.0f} MiB: "
                    f"{left:+.1f} MiB are unaccounted for, more than {LIMIT_BYTES // MIB}"
                )
    return found


def lines(report: dict[str, Any]) -> list[str]:
    """A table for people, in MiB."""
    rows = [row for row in report["results"] if "error" not in row]
    if not rows:
        return ["no case ended well"]
    where, total = rows[0]["environment"], rows[0]["start"]["total"]
    told = [
        f"MiB on {where['device_name'] or where['device']} of {total / MIB:,.0f}; unaccounted at the start and after "
        "requests; largest: of the recordings; retained: in use after closing, more than before",
        f"{'shape':<12} {'share':>5} "
        + " ".join(f"{name:>9}" for name in (*PARTS, "sum", "device"))
        + f" {'unaccounted':>14} {'KV tokens':>10} {'start s':>8} {'largest':>8} {'retained':>8}",
    ]
    for row in rows:
        start, most = row["start"], row["largest_recording"]
        sizes = (*start["parts"].values(), start["sum"], start["used"])
        differences = " / ".join(f"{row[moment]['unaccounted'] / MIB:+.1f}" for moment in MOMENTS)
        told.append(
            f"{row['shape']:<12} {row['gpu_memory_utilization']:>5} "
            + " ".join(f"{size / MIB:9,.0f}" for size in sizes)
            + f" {differences:>14} {row['kv_tokens']:>10,} {row['start_s']:8.2f} "
            + f"{(most['bytes'] if most else 0) / MIB:8.1f} {row['closed']['retained'] / MIB:8.1f}"
        )
    return told


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", type=Path, nargs="+", metavar="SHAPE", help="folders with config.json")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", help="cuda or one of several, such as cuda:1 [cuda]")
    parser.add_argument("--utilization", type=_shares, default=[0.5, 0.9, 0.97], metavar="A,B", help="[0.5,0.9,0.97]")
    parser.add_argument("--num-prompts", type=int, default=32, help="requests [32]")
    parser.add_argument("--prompt-len", type=int, default=512, help="tokens of each [512]")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of each [64]")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main())
