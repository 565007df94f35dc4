"""vLLM on a model's shape with random weights, by the protocols of `ostinato bench decode`, `prefill` and `throughput`.

    python peer_vllm.py MODEL_DIR --batch 1,8,64 [--runs 3] [--prefill-len 2048] [--throughput]

Time per output token is the time of `output-len` output tokens less the time of one, divided by the tokens between;
prompts of random ids, greedy, no stop, no text, no prefix cache. After each part a line that begins with RESULT holds
everything measured so far, so that what was measured survives a failure later on.

It imports nothing of Ostinato, as it runs in the peer's own environment.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

MARK = "RESULT "


def main() -> None:
    args = parse()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # its sampler needs a package that may be missing
    started = time.monotonic()
    import vllm

    imported = time.monotonic()
    llm = vllm.LLM(
        model=args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        gpu_memory_utilization=0.8,
        dtype="bfloat16",
        enable_prefix_caching=False,
        seed=0,
    )
    ready = time.monotonic()
    rng = random.Random(0)

    def generate(prompts: list[list[int]], params: Any) -> float:
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - start

    def timed(batch: int, num_in: int, num_out: int) -> float:
        params = vllm.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_out, detokenize=False)
        return generate([draw(rng, num_in) for _ in range(batch)], params)

    timed(1, args.prompt_len, 1)
    result: dict[str, Any] = {
        "peer": f"vllm {vllm.__version__}",
        "import_s": imported - started,
        "ready_s": ready - imported,
        "first_token_at_s": time.monotonic(),  # the starting process knows when it began, by the same clock
        "timings": [],
    }
    emit(result)
    for batch in args.batch:
        timed(batch, args.prompt_len, min(8, args.output_len))
        ones = [timed(batch, args.prompt_len, 1) for _ in range(args.runs)]
        many = [timed(batch, args.prompt_len, args.output_len) for _ in range(args.runs)]
        ms = 1e3 / (args.output_len - 1)
        result["timings"].append(
            {
                "batch": batch,
                "tpot_min_ms": (min(many) - min(ones)) * ms,
                "tpot_median_ms": (statistics.median(many) - statistics.median(ones)) * ms,
                "spread_ms": (max(many) - min(many)) * ms,
                "ttft_ms": min(ones) * 1e3,
            }
        )
        emit(result)
    timed(1, args.prefill_len, 1)
    times = [timed(1, args.prefill_len, 1) * 1e3 for _ in range(args.runs)]
    result["prefill"] = {"prompt_len": args.prefill_len, "ttft_ms": spread(times)}
    emit(result)
    if args.throughput:
        result["throughput"] = throughput(args, vllm.SamplingParams, generate)
        emit(result)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 64])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=129)
    parser.add_argument("--prefill-len", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--throughput-runs", type=int, default=1)
    parser.add_argument("--num-prompts", type=int, default=256)
    parser.add_argument("--min-len", type=int, default=100)
    parser.add_argument("--max-len", type=int, default=1024)
    return parser.parse_args()


def throughput(args: argparse.Namespace, params_of: Any, generate: Any) -> dict[str, Any]:
    rng = random.Random(0)  # the lengths of `ostinato bench throughput`, which draws them in this order
    lengths = [
        (rng.randint(args.min_len, args.max_len), rng.randint(args.min_len, args.max_len))
        for _ in range(args.num_prompts)
    ]
    prompts = [draw(rng, num_in) for num_in, _ in lengths]
    params = [
        params_of(temperature=0.6, ignore_eos=True, max_tokens=num_out, detokenize=False) for _, num_out in lengths
    ]
    num_in, num_out = (sum(each) for each in zip(*lengths, strict=True))
    generate(prompts, params)
    times = [generate(prompts, params) for _ in range(args.throughput_runs)]
    return {
        "prompt_tokens": num_in,
        "output_tokens": num_out,
        "times_s": times,
        "output_tokens_per_s": spread([num_out / seconds for seconds in times]),
        "total_tokens_per_s": spread([(num_in + num_out) / seconds for seconds in times]),
    }


def draw(rng: random.Random, num_tokens: int) -> list[int]:
    return rng.choices(range(10, 10_000), k=num_tokens)


def spread(values: Sequence[float]) -> dict[str, float]:
    least, most = min(values), max(values)
    return {"min": least, "median": statistics.median(values), "max": most, "spread": most - least}


def emit(result: dict[str, Any]) -> None:
    print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
