"""Ostinato and a peer side by side: same GPU, same sitting, fresh processes, one JSON and one table per model.

    python benchmarks/compare.py MODEL_DIR ... [--batch 1,8,64,256] [--throughput] [--modes] [--out FILE]
    python benchmarks/compare.py --from FILE

Uses random weights for the shape in MODEL_DIR/config.json. `--peer-path` becomes the PYTHONPATH of the peer's process
alone. What a peer measured in another sitting is never read: both are run here, in turn, and the file is written after
each half. Where one fails, the other's half is kept with the error, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from process import Finished, run_process
from sitting import MixedSittingsError, load, new_id, require_one_sitting, stamp, without_paths
from tables import errors_of, print_report

HERE = Path(__file__).resolve().parent
RESULT = "RESULT "
DEFAULT_MODES = "NONE,PIECEWISE,FULL,FULL_AND_PIECEWISE"


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    try:
        report = load(args.source) if args.source is not None else _compare(args)
    except MixedSittingsError as error:
        print(f"compare.py: error: {error}", file=sys.stderr)
        return 2
    print_report(report)
    halves = [entry[half] for entry in report["models"] for half in ("ostinato", "peer") if entry[half]]
    return 1 if any(errors_of(half) for half in halves) else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="print an earlier result again")
    parser.add_argument("--peer", choices=("vllm", "none"), default="vllm")
    parser.add_argument("--peer-path", default="", metavar="FOLDER", help="PYTHONPATH of the peer's process")
    parser.add_argument("--peer-python", default=sys.executable, metavar="FILE", help="the peer's interpreter")
    parser.add_argument("--batch", default="1,8,64,256")
    parser.add_argument("--runs", default="3", help="timings of each length")
    parser.add_argument("--prompt-len", default="128")
    parser.add_argument("--output-len", default="129")
    parser.add_argument("--prefill-len", default="2048", help="tokens of the long prompt")
    parser.add_argument("--startup-runs", default="3", help="processes started, 0 for none")
    parser.add_argument(
        "--throughput", nargs="?", const="all", default="", metavar="NAME,...",
        help="also 256 requests of 100 to 1024 tokens in and out, of every model or of some",
    )  # fmt: skip
    parser.add_argument("--throughput-runs", default="1", help="runs of it that count, after the one that warms up")
    parser.add_argument("--modes", nargs="?", const=DEFAULT_MODES, help=f"also Ostinato by mode [{DEFAULT_MODES}]")
    parser.add_argument("--max-num-seqs", default="256")
    parser.add_argument("--max-model-len", default="4096")
    parser.add_argument("--device", help="of Ostinato, cpu to try the script out")
    parser.add_argument("--bandwidth", default="auto", help="of reading memory in TB/s, or auto to measure it")
    parser.add_argument("--timeout", type=float, default=1200.0, metavar="S", help="of each process")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "compare.json", metavar="FILE")
    args = parser.parse_args(argv)
    if args.source is not None and args.models:
        parser.error("--from prints an earlier result: it takes no models")
    if args.source is None and not args.models:
        parser.error("name a model folder, or an earlier result with --from")
    for model in args.models:
        if not (model / "config.json").is_file():
            parser.error(f"{model} has no config.json")
    if len({model.resolve().name for model in args.models}) < len(args.models):
        parser.error("two models have the same name, and a result names them by it")
    if not args.out.resolve().parent.is_dir():
        parser.error(f"--out {args.out}: there is no such folder")
    return args


def _compare(args: argparse.Namespace) -> dict[str, Any]:
    sitting_id = new_id()
    report: dict[str, Any] = {
        "benchmark": "compare",
        "sitting": stamp(sitting_id),
        "bandwidth": _bandwidth(args),
        "models": [],
    }
    for model in args.models:
        entry: dict[str, Any] = {"name": model.resolve().name, "ostinato": None, "peer": None}
        report["models"].append(entry)
        entry["ostinato"] = _ours(args, model, report["bandwidth"]["read_tb_s"]) | {"sitting": stamp(sitting_id)}
        _save(args.out, report)
        if args.peer != "none":
            entry["peer"] = _peer(args, model) | {"sitting": stamp(sitting_id)}
            _save(args.out, report)
    require_one_sitting(report)
    return report


def _wants_throughput(args: argparse.Namespace, model: Path) -> bool:
    return args.throughput == "all" or model.resolve().name in args.throughput.split(",")


def _save(path: Path, report: dict[str, Any]) -> None:
    """In one move: a process that is ended while it writes leaves the file of before."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(path)


def _bandwidth(args: argparse.Namespace) -> dict[str, Any]:
    """The floor of a decode step is its bytes over the read bandwidth."""
    if args.bandwidth != "auto":
        return {"read_tb_s": float(args.bandwidth)}
    done = run_process([sys.executable, str(HERE / "bandwidth.py")], timeout_s=args.timeout)
    if done.error:
        raise SystemExit(f"the bandwidth could not be measured:\n{done.error}")
    return dict(json.loads(done.lines[-1]))


def _ours(args: argparse.Namespace, model: Path, read_tb_s: float) -> dict[str, Any]:
    """Every part in a process of its own; one that fails is kept as its error."""
    lengths = ["--prompt-len", args.prompt_len, "--output-len", args.output_len]
    timed = ["--runs", args.runs, "--max-num-seqs", args.max_num_seqs]
    rate = ["--bandwidth", str(read_tb_s)]
    parts = {
        "decode": ["--batch", args.batch, *lengths, *timed, *rate],
        "prefill": ["--prompt-len", args.prefill_len, *timed],
    }
    if args.startup_runs != "0":
        starts = ["--runs", args.startup_runs, "--prompt-len", args.prompt_len]
        parts["startup"] = [*starts, "--max-num-seqs", args.max_num_seqs]
    if _wants_throughput(args, model):
        parts["throughput"] = ["--runs", args.throughput_runs, "--max-num-seqs", args.max_num_seqs]
    if args.modes:
        parts["modes"] = ["--modes", args.modes, "--batch", args.batch, *lengths, *timed, *rate]
    half: dict[str, Any] = {}
    for part, options in parts.items():
        began = time.monotonic()
        half[part] = _bench(args, model, part, options)
        print(f"[{model.name}: bench {part} took {time.monotonic() - began:.0f} s]", file=sys.stderr, flush=True)
    return half


def _bench(args: argparse.Namespace, model: Path, part: str, options: list[str]) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    try:
        file = folder / f"{part}.json"
        command = [sys.executable, "-m", "ostinato.cli", "bench", part, str(model), "--load-format", "dummy", *options]
        command += ["--max-model-len", args.max_model_len, "--json", str(file)]
        done = run_process(command + (["--device", args.device] if args.device else []), timeout_s=args.timeout)
        return {"error": without_paths(done.error)} if done.error else dict(json.loads(file.read_text()))
    finally:
        shutil.rmtree(folder)


def _peer(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """What it had measured when it ended, with the error where it failed."""
    environment = dict(os.environ)
    if args.peer_path:
        environment["PYTHONPATH"] = args.peer_path
    command = [args.peer_python, str(HERE / f"peer_{args.peer}.py"), str(model), "--batch", args.batch]
    for name in ("runs", "prompt_len", "output_len", "prefill_len", "throughput_runs", "max_num_seqs", "max_model_len"):
        command += [f"--{name.replace('_', '-')}", getattr(args, name)]
    began = time.monotonic()
    done = run_process(
        command + (["--throughput"] if _wants_throughput(args, model) else []), timeout_s=args.timeout, env=environment
    )
    return _peer_half(args.peer, done, began)


def _peer_half(peer: str, done: Finished, began: float) -> dict[str, Any]:
    found = [line.removeprefix(RESULT) for line in done.lines if line.startswith(RESULT)]
    half: dict[str, Any] = json.loads(found[-1]) if found else {"peer": peer}
    if (first := half.pop("first_token_at_s", None)) is not None:
        half["first_token_s"] = first - began
    error = done.error or ("" if found else "it ended without a result")
    return half | ({"error": without_paths(error)} if error else {})


if __name__ == "__main__":
    sys.exit(main())
