"""Measures heads that choose tokens (`ops.small_linear_sample`) against logits and sampler, on a Hopper GPU.

    python benchmarks/tune_heads.py results.json [--models llama-1b,...] [--rows 4,8,16,32,64,128,256] [--write FILE]

Timed in a CUDA graph are norm, head and sampler, over weights larger than the L2 cache, with three kinds of rows:
greedy ones, ones that draw (whose noise costs a head more), and ones with a top-p (whose logits are written and read
either way). Against it stands what a step does without: the product that `models/projections.py` picks for the shape,
and `ops.sample`. A tiling is put into `small_tuned.HEADS` if it is faster for greedy and drawing rows together and
slower for no kind. Candidates compile first, in parallel processes, and must give the tokens of the separate ops.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.kernels import ops, triton_small_gemm
from ostinato.kernels.few_configs import max_few_rows
from ostinato.kernels.small_configs import HEAD_ROWS, SmallConfig, small_config
from ostinato.kernels.small_tuned import HEADS
from ostinato.kernels.triton_small_head import launch_head
from tune_few import EPS, MODELS, Model, random, record, replay_ms
from tune_small import GAIN, Product, candidates
from tuned_tables import write_table

KINDS: Final = ("greedy", "drawn", "top_p")
REPEATS: Final = 4
"""Heads in a graph, of which each reads the weights anew."""
SLOWER: Final = 1.01
"""What no kind of row may take longer than, beside the separate ops: more than times scatter."""


def head_candidates(num_vocab: int, size: int, num_rows: int, num_sms: int) -> Iterator[SmallConfig]:
    """Those of the product; a large tile takes eight warps, as its noise spills registers of four."""
    for config in candidates(Product("head", num_vocab, size), num_rows, num_sms):
        large = config.block_m * config.block_n >= 64 * 128
        yield replace(config, num_warps=8) if large else config


def sampling_state(num_slots: int, num_vocab: int, kind: str) -> ops.SamplingState:
    """Of rows of one kind."""

    def ints(value: int, *more: int) -> Tensor:
        return torch.full((num_slots, *more), value, dtype=torch.int32, device="cuda")

    def floats(value: float, *more: int) -> Tensor:
        return torch.full((num_slots, *more), value, device="cuda")

    return ops.SamplingState(
        temperature=floats(0.0 if kind == "greedy" else 0.8),
        top_p=floats(0.9 if kind == "top_p" else 1.0),
        min_p=floats(0.0),
        repetition_penalty=floats(1.0),
        presence_penalty=floats(0.0),
        frequency_penalty=floats(0.0),
        top_k=ints(0),
        seed_lo=torch.arange(num_slots, dtype=torch.int32, device="cuda"),
        seed_hi=ints(3),
        min_length=ints(0),
        num_tokens=ints(100),
        stop_ids=ints(-1, 64),
        bias_ids=ints(-1, 300),
        bias_values=floats(0.0, 300),
        output_counts=ints(0, num_vocab),
        in_prompt=torch.zeros((num_slots, num_vocab), dtype=torch.bool, device="cuda"),
        allowed=ints(-1, -(-num_vocab // 32)),
        flags=ints(0),
    )


class Head:
    """One model's norm, head and sampler at some number of rows."""

    def __init__(self, num_vocab: int, size: int, num_rows: int, weight: Tensor) -> None:
        self.num_rows, self.weight = num_rows, weight
        self.stream, self.norm = random(num_rows, size), 1 + random(size, scale=0.1)
        self.logits = torch.zeros((num_rows, num_vocab), device="cuda", dtype=torch.bfloat16)
        self.adjusted = torch.zeros((num_rows, num_vocab), device="cuda")
        self.sampled = torch.zeros(num_rows, device="cuda", dtype=torch.int32)
        self.row_slot = torch.arange(num_rows, device="cuda", dtype=torch.int32)
        self.num_logprobs = torch.full((num_rows + 1,), -1, device="cuda", dtype=torch.int32)
        self.state = sampling_state(num_rows + 1, num_vocab, KINDS[0])

    def of_kind(self, kind: str) -> None:
        self.state = sampling_state(self.num_rows + 1, self.logits.shape[1], kind)

    def separate(self) -> None:
        """As `models/projections.py` has it."""
        (num_vocab, size), weight = self.weight.shape, self.weight
        if self.num_rows <= max_few_rows(size):
            ops.few_norm_linear(self.stream, self.norm, weight, None, EPS, self.logits)
        else:
            normed = ops.rms_norm(self.stream, self.norm, EPS)
            if small_config("plain", num_vocab, size, self.num_rows) is None:
                torch.mm(normed, weight.t(), out=self.logits)
            else:
                ops.small_linear(normed, weight, None, self.logits)
        ops.sample(self.logits, self.row_slot, self.state, self.adjusted, self.sampled)

    def fused(self, config: SmallConfig) -> None:
        normed = ops.rms_norm(self.stream, self.norm, EPS)
        launch_head(config, normed, self.weight, self.row_slot, self.state, self.num_logprobs, self.logits,
                    self.adjusted, self.sampled)  # fmt: skip

    def ms(self, config: SmallConfig | None) -> dict[str, float]:
        """Of one head, by kind of row."""
        times = {}
        for kind in KINDS:
            self.of_kind(kind)

            def run() -> None:
                for _ in range(REPEATS):
                    self.separate() if config is None else self.fused(config)

            times[kind] = replay_ms(record(run)) / REPEATS
        return times


def check(case: tuple[int, int, int, SmallConfig]) -> str:
    """Compiles a candidate and compares its tokens with those of the separate ops: empty, or what is wrong."""
    num_vocab, size, num_rows, config = case
    some = 5 * config.block_n + (0 if num_vocab % config.block_n == 0 else 16)
    torch.manual_seed(size + num_rows)
    try:
        head = Head(some, size, num_rows, random(some, size, scale=size**-0.5))
        for kind in KINDS:
            head.of_kind(kind)
            head.fused(config)
            found = head.sampled.clone()
            normed = ops.rms_norm(head.stream, head.norm, EPS)
            triton_small_gemm.launch(config, normed, head.weight, None, head.logits)
            ops.sample(head.logits, head.row_slot, head.state, head.adjusted, head.sampled)
            if not torch.equal(found, head.sampled):
                return f"other tokens for {kind} rows"
            exact = F.linear(normed.double(), head.weight.double())
            if float((head.logits.double() - exact).norm() / exact.norm()) > 0.01:
                return "wrong logits"
    except Exception as reason:  # a candidate that does not compile is no candidate
        return repr(reason)[:300]
    return ""


def score(times: dict[str, float]) -> float:
    return times["greedy"] + times["drawn"]


def best_of(head: Head, options: list[SmallConfig], deadline: float) -> tuple[SmallConfig | None, dict[str, Any]]:
    """The tiling to list, or None, and what was measured."""
    separate = head.ms(None)
    tried: list[tuple[float, SmallConfig, dict[str, float]]] = []
    for config in options:
        if time.time() > deadline:
            break
        times = head.ms(config)
        tried.append((score(times), config, times))
    tried.sort(key=lambda entry: entry[0])
    chosen = None
    for _, config, _ in tried[:3]:
        times = head.ms(config)  # once more, both: a lucky run must not win
        separate = {kind: min(taken, separate[kind]) for kind, taken in head.ms(None).items()}
        if score(times) < GAIN * score(separate) and all(times[k] <= SLOWER * separate[k] for k in KINDS):
            chosen = config
            break
    lines = [(astuple(config), times) for _, config, times in tried[:12]]
    return chosen, {"separate_ms": separate, "tried": lines, "count": len(tried), "of": len(options)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--models", default=",".join(one.name for one in MODELS))
    parser.add_argument("--rows", default=",".join(map(str, HEAD_ROWS)))
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--write", type=Path, help="small_tuned.py, in which the heads of these shapes are replaced")
    args = parser.parse_args()
    started = time.time()
    models: list[Model] = [one for one in MODELS if one.name in args.models.split(",")]
    cases = [(one, int(number)) for one, number in itertools.product(models, args.rows.split(","))]
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    options = {
        (one.name, num_rows): list(dict.fromkeys(head_candidates(one.head.num_out, one.head.size, num_rows, num_sms)))
        for one, num_rows in cases
    }
    unique = {
        (one.head.size, one.head.num_out % config.block_n == 0, config): (
            one.head.num_out, one.head.size, num_rows, config,
        )
        for one, num_rows in cases
        for config in options[one.name, num_rows]
    }  # fmt: skip
    with ProcessPoolExecutor(15, mp_context=multiprocessing.get_context("spawn")) as pool:
        verdicts = dict(zip(unique, pool.map(check, unique.values(), chunksize=4), strict=True))
    bad = {repr(key): text for key, text in verdicts.items() if text}
    print(f"{len(unique)} kernels, {len(bad)} bad, {time.time() - started:.0f} s", list(bad.items())[:3], flush=True)

    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "bad": bad, "heads": []}
    for number, (one, num_rows) in enumerate(cases):
        num_vocab, size = one.head.num_out, one.head.size
        left = args.seconds + started - time.time()
        good = [
            config
            for config in options[one.name, num_rows]
            if not verdicts[size, num_vocab % config.block_n == 0, config]
        ]
        head = Head(num_vocab, size, num_rows, random(num_vocab, size, scale=0.02))
        chosen, measured = best_of(head, good, time.time() + left / (len(cases) - number))
        HEADS.pop((num_vocab, size, num_rows), None)
        if chosen is not None:
            HEADS[num_vocab, size, num_rows] = astuple(chosen)
        report["heads"].append({"model": one.name, "rows": num_rows, "chosen": chosen and astuple(chosen)} | measured)
        best = measured["tried"][0] if measured["tried"] else None
        print(one.name, num_rows, "separate", measured["separate_ms"], "best", best, "chosen", chosen, flush=True)
        args.results.write_text(json.dumps(report))
        if args.write is not None:
            write_table(args.write, "HEADS", HEADS)
        del head
        torch.cuda.empty_cache()
    print(f"done at {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
