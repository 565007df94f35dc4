"""Ostinato and a peer side by side: same GPU, same sitting, fresh processes, one JSON and one table per model.

    python benchmarks/compare.py MODEL_DIR ... --peer vllm [--peer-path FOLDER] [--batch 1,8,64] [--out DIR]

`--peer-path` becomes the PYTHONPATH of the peer's process alone. What a peer measured in another sitting is never
read: both are run here, in turn. Uses random weights for the shape in MODEL_DIR/config.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--peer", choices=("vllm", "none"), default="vllm")
    parser.add_argument("--peer-path", default="")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--modes", default="NONE,PIECEWISE,FULL,FULL_AND_PIECEWISE")
    parser.add_argument("--max-num-seqs", default="256")
    parser.add_argument("--runs", default="3")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    bandwidth = _bandwidth()
    for model in args.models:
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ours = _ours(args, model, bandwidth["read_tb_s"])
        peer = _peer(args, model) if args.peer != "none" else None
        report = {"sitting": began, "bandwidth": bandwidth, "ostinato": ours, "peer": peer}
        path = args.out / f"modes-{model.name}.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
        _print(model.name, report)
    return 0


def _bandwidth() -> dict[str, float]:
    """Copy and read bandwidth of the GPU in TB/s: the floor of a decode step is its bytes over the second."""
    done = subprocess.run([sys.executable, str(HERE / "bandwidth.py")], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _ours(args: argparse.Namespace, model: Path, read_tb_s: float) -> dict[str, Any]:
    path = args.out / f".{model.name}.json"
    command = [sys.executable, "-m", "ostinato.cli", "bench", "modes", str(model), "--load-format", "dummy"]
    command += ["--batch", args.batch, "--modes", args.modes, "--runs", args.runs, "--max-num-seqs", args.max_num_seqs]
    command += ["--max-model-len", "4096", "--bandwidth", str(read_tb_s), "--json", str(path)]
    subprocess.run(command, check=True)
    report = dict(json.loads(path.read_text()))
    path.unlink()
    report["model"]["name"] = model.name
    return report


def _peer(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    environment = dict(os.environ)
    if args.peer_path:
        environment["PYTHONPATH"] = args.peer_path
    command = [sys.executable, str(HERE / f"peer_{args.peer}.py"), str(model)]
    command += ["--batch", args.batch, "--runs", args.runs, "--max-num-seqs", args.max_num_seqs]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
        raise SystemExit(f"{args.peer} failed on {model}")
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"peer"')]
    return dict(json.loads(lines[-1]))


def _print(name: str, report: dict[str, Any]) -> None:
    rows = {"floor": {}, **{result["mode"]: result["timings"] for result in report["ostinato"]["results"]}}
    if report["peer"] is not None:
        rows[report["peer"]["peer"]] = report["peer"]["timings"]
    floor = report["ostinato"]["floor_ms"]
    print(f"\n{name}: TPOT in ms, fastest and (median); floor of the weights {floor:.3f} ms")
    for title, timings in rows.items():
        cells = [f"b{t['batch']}: {t['tpot_min_ms']:.3f} ({t['tpot_median_ms']:.3f})" for t in timings]
        if cells:
            print(f"  {title:20s}", "   ".join(cells), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
