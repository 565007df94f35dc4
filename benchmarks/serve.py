"""The server's throughput beside the same engine's without a server, and beside vLLM's server, in one sitting.

    python benchmarks/serve.py SHAPE --concurrency 64,256 [--peer-path SITE] --out FILE

SHAPE is a folder with a `config.json`; weights are random. Both servers get the same made-up tokenizer (each id is a
short piece of text), so that both turn every token into text. Requests: prompts of random ids, uniform lengths around
`--input-len` and `--output-len`, greedy, no stop; `ostinato bench serve` sends them from several processes, streamed, a
closed loop at each concurrency. Offline: the same prompts and lengths through `LLM.generate` with text, as many rows at
once. `--peer-path`: where vLLM is unpacked, for `PYTHONPATH` of its server alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sitting
from ostinato.cli.bench.serve_load import Load, make_jobs

READY_S = 400.0
MAX_MODEL_LEN = 4096
PEER_KV_BYTES = 60 << 30  # more than any load here needs; given, so that the peer need not find out what fits


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / args.shape.name
        make_model(args.shape, model)
        report: dict[str, Any] = {
            "benchmark": "serve",
            "shape": args.shape.name,
            "command": " ".join(["python", "benchmarks/serve.py", args.shape.name, *sys.argv[2:]]),
            "sitting": sitting.stamp(sitting.new_id()),
            "input_len": args.input_len,
            "output_len": args.output_len,
            "range_ratio": args.range_ratio,
            "client_processes": args.client_processes,
            "results": [],
        }
        if args.peer_path is not None:
            peer = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
            peer += ["--load-format", "dummy", "--max-num-seqs", "256", "--max-model-len", str(MAX_MODEL_LEN)]
            peer += ["--no-enable-prefix-caching", "--dtype", "bfloat16", "--disable-log-stats"]
            peer += ["--kv-cache-memory-bytes", str(PEER_KV_BYTES), "--gpu-memory-utilization", "0.6"]
            environment = dict(os.environ) | {
                "PYTHONPATH": str(args.peer_path),
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
            }
            with server(peer, environment) as url:
                for row in loads(args, url, "vllm serve"):
                    keep(report, row, args.out)
        for concurrency in args.concurrency:
            row = {"who": "ostinato, no server", "concurrency": concurrency} | offline(args, model, concurrency)
            keep(report, row, args.out)
        ours = [sys.executable, "-m", "ostinato.cli", "serve", str(model), "--load-format", "dummy", "--max-num-seqs"]
        ours += ["256", "--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"]
        with server(ours, dict(os.environ)) as url:
            for row in loads(args, url, "ostinato serve"):
                keep(report, row, args.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path)
    parser.add_argument("--concurrency", type=lambda text: [int(part) for part in text.split(",")], default=[64, 256])
    parser.add_argument("--rounds", type=int, default=3, help="requests for each of the concurrency [3]")
    parser.add_argument("--input-len", type=int, default=560)
    parser.add_argument("--output-len", type=int, default=560)
    parser.add_argument("--range-ratio", type=float, default=0.8)
    parser.add_argument("--client-processes", type=int, default=8)
    parser.add_argument("--peer-path", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def keep(report: dict[str, Any], row: dict[str, Any], out: Path) -> None:
    report["results"].append(row)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(row), flush=True)


def make_model(shape: Path, folder: Path) -> None:
    """The shape with a tokenizer of its vocabulary's size: byte-level, every id a piece of its own, no merges."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel as Splitter

    folder.mkdir()
    shutil.copy(shape / "config.json", folder)
    size = json.loads((shape / "config.json").read_text())["vocab_size"]
    pieces = sorted(Splitter.alphabet())
    pieces += [f"\u0120w{number:x}" for number in range(size - len(pieces))]
    tokenizer = Tokenizer(BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = Splitter(add_prefix_space=False), ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "\u0120w0", "model_max_length": MAX_MODEL_LEN}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def offline(args: argparse.Namespace, model: Path, concurrency: int) -> dict[str, Any]:
    """In a process of its own, so that nothing of it is left when the servers run."""
    words = [
        sys.executable,
        __file__,
        "--offline",
        json.dumps(load_of(args, concurrency)),
        str(model),
        str(concurrency),
    ]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=dict(os.environ))
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def load_of(args: argparse.Namespace, concurrency: int) -> dict[str, Any]:
    return {
        "num_prompts": args.rounds * concurrency,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "range_ratio": args.range_ratio,
    }


def run_offline(facts: dict[str, Any], model: str, concurrency: int) -> None:
    from ostinato import LLM, SamplingParams

    jobs = make_jobs(Load(model=model, endpoint="/v1/completions", vocab_size=10000, **facts))
    prompts = [job.body["prompt"] for job in jobs]
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=job.output_len) for job in jobs]
    options: dict[str, Any] = {"load_format": "dummy", "max_num_seqs": concurrency, "max_model_len": MAX_MODEL_LEN}
    with LLM(model, enable_prefix_caching=False, **options) as llm:
        llm.generate(prompts[:1], params[:1])
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - begin
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(json.dumps({"output_tokens": tokens, "duration_s": seconds, "output_tokens_per_s": tokens / seconds}))


@contextmanager
def server(words: list[str], environment: dict[str, str]) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*words, "--port", str(port)], env=environment, stdout=log, stderr=log)
        try:
            began = time.monotonic()
            while not is_up(url):
                if process.poll() is not None or time.monotonic() - began > READY_S:
                    log.seek(0)
                    raise SystemExit(log.read().decode(errors="replace")[-6000:])
                time.sleep(0.5)
            print(f"up after {time.monotonic() - began:.1f} s", flush=True)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def loads(args: argparse.Namespace, url: str, who: str) -> Iterator[dict[str, Any]]:
    for concurrency in args.concurrency:
        facts = load_of(args, concurrency)
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            words = [sys.executable, "-m", "ostinato.cli", "bench", "serve", url, "--token-ids", "--json", file.name]
            words += ["--num-prompts", str(facts["num_prompts"]), "--max-concurrency", str(concurrency)]
            words += ["--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)]
            words += ["--random-range-ratio", str(args.range_ratio), "--num-warmups", "3"]
            words += ["--client-processes", str(args.client_processes)]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=dict(os.environ))
            found = json.loads(Path(file.name).read_text())
        summary = found["summary"]
        kept = ("num_completed", "output_tokens", "duration_s", "output_tokens_per_s", "ttft_ms", "tpot_ms", "itl_ms")
        row = {"who": who, "concurrency": concurrency} | {name: summary[name] for name in kept}
        yield row | {"server_version": found["server"]["version"], "client_busy_share": found["client"]["busy_share"]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--offline"]:
        run_offline(json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        main()
