"""vLLM's decode latency on a model's shape with random weights: one JSON object on standard output's last line.

    python peer_vllm.py MODEL_DIR --batch 1,8,64 [--runs 3] [--prompt-len 128] [--output-len 129]

The protocol is that of `ostinato bench modes`: the time of `output-len` output tokens less the time of one, divided by
the tokens between; prompts of random ids, greedy, no stop, no text, no prefix cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=129)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # its sampler needs a package that may be missing
    started = time.perf_counter()
    import vllm
    from vllm import LLM, SamplingParams

    imported = time.perf_counter()
    llm = LLM(
        model=args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_seqs=args.max_num_seqs,
        gpu_memory_utilization=0.8,
        dtype="bfloat16",
        enable_prefix_caching=False,
        seed=0,
    )
    ready = time.perf_counter()
    rng = random.Random(0)

    def timed(batch: int, num_in: int, num_out: int) -> float:
        prompts = [{"prompt_token_ids": rng.choices(range(10, 10_000), k=num_in)} for _ in range(batch)]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_out, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    timings = []
    ms = 1e3 / (args.output_len - 1)
    for batch in map(int, args.batch.split(",")):
        timed(batch, args.prompt_len, min(8, args.output_len))
        ones = [timed(batch, args.prompt_len, 1) for _ in range(args.runs)]
        many = [timed(batch, args.prompt_len, args.output_len) for _ in range(args.runs)]
        timings.append(
            {
                "batch": batch,
                "tpot_min_ms": (min(many) - min(ones)) * ms,
                "tpot_median_ms": (statistics.median(many) - statistics.median(ones)) * ms,
                "spread_ms": (max(many) - min(many)) * ms,
                "ttft_ms": min(ones) * 1e3,
            }
        )
    long = [timed(1, 2048, 1) for _ in range(args.runs)]
    print(
        json.dumps(
            {
                "peer": f"vllm {vllm.__version__}",
                "import_s": imported - started,
                "startup_s": ready - imported,
                "timings": timings,
                "ttft_2048_ms": min(long) * 1e3,
            }
        )
    )


if __name__ == "__main__":
    main()
