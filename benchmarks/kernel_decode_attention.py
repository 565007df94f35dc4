"""Decode attention on a GPU: rope, cache write and attention as three ops, against the fused op and its variants.

    python benchmarks/kernel_decode_attention.py --json results.json

Times one CUDA graph of many layers, each with a cache of its own, so that nothing is read twice from L2: at least 16
layers, and as many as it takes to pass 256 MiB of keys and values (at most 512). Prints microseconds per layer and the
rate at which keys and values are read; the difference from the three ops' output is checked first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

from ostinato.kernels import ops
from ostinato.kernels.splits import choose_num_splits

SHAPES = [(1, 128), (1, 1024), (1, 32768), (8, 1024), (64, 1024), (64, 4096), (256, 1024)]  # rows, context
HEAD_SIZES = [64, 128]
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 32, 8, 16
MIN_LAYERS, MAX_LAYERS, MIN_KV_BYTES = 16, 512, 256 * 2**20
TOLERANCE = 0.03  # bfloat16 output of values near 1


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    fused: bool
    merged: bool = False  # the last split to finish merges, instead of a second kernel
    pdl: bool = False


VARIANTS = [
    Variant("three ops", fused=False),
    Variant("fused, merge kernel", fused=True),
    Variant("fused, merge kernel, pdl", fused=True, pdl=True),
    Variant("fused, merged", fused=True, merged=True),
    Variant("fused, merged, pdl", fused=True, merged=True, pdl=True),
]


@dataclass(frozen=True, slots=True)
class Result:
    rows: int
    context: int
    head_size: int
    num_splits: int
    num_layers: int
    variant: str
    us_per_layer: float
    us_spread: float
    kv_tb_s: float
    max_difference: float


class Problem:
    """One step's inputs and the caches of all layers; every layer reads the same q, k, v."""

    def __init__(self, rows: int, context: int, head_size: int, max_context: int, num_splits: int | None) -> None:
        device = torch.device("cuda")
        self.rows, self.context, self.head_size = rows, context, head_size
        blocks = -(-context // BLOCK_SIZE)
        width = max(-(-max_context // BLOCK_SIZE), blocks)
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.num_splits = num_splits or choose_num_splits(rows, NUM_KV_HEADS, width, num_sms)
        self.kv_bytes = rows * context * NUM_KV_HEADS * head_size * 2 * 2
        self.num_layers = min(max(MIN_LAYERS, -(-MIN_KV_BYTES // self.kv_bytes)), MAX_LAYERS)
        shape = (rows * blocks + 1, 2, BLOCK_SIZE, NUM_KV_HEADS, head_size)
        pools = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(self.num_layers)]
        self.caches = [(pool[:, 0], pool[:, 1]) for pool in pools]
        self.qkv = torch.randn((rows, NUM_HEADS + 2 * NUM_KV_HEADS, head_size), dtype=torch.bfloat16, device=device)
        self.out = torch.zeros((rows, NUM_HEADS, head_size), dtype=torch.bfloat16, device=device)
        self.table = torch.zeros((rows + 1, width), dtype=torch.int32, device=device)
        order = torch.randperm(rows * blocks, device=device).to(torch.int32) + 1
        self.table[:rows, :blocks] = order.view(rows, blocks)
        self.row_slot = torch.arange(rows, dtype=torch.int32, device=device)
        self.query_start = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.full((rows,), context, dtype=torch.int32, device=device)
        self.positions = self.seq_lens - 1
        last_block = self.table[:rows, blocks - 1]
        self.slots = last_block * BLOCK_SIZE + self.positions % BLOCK_SIZE
        angles = torch.rand((context, head_size // 2), device=device) * 6.3
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.counters = torch.zeros(rows * NUM_KV_HEADS, dtype=torch.int32, device=device)

    def layer(self, variant: Variant, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        q, k, v = qkv.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)
        scale = self.head_size**-0.5
        if variant.fused:
            ops.decode_attention(
                q, k, v, self.positions, self.cos_sin, None, None, 0.0, self.slots, k_cache, v_cache, self.table,
                self.row_slot, self.seq_lens, scale, 1, self.rows, self.num_splits, self.out,
                self.counters if variant.merged else None, variant.pdl,
            )  # fmt: skip
        else:
            ops.rope(q, k, self.positions, self.cos_sin)
            ops.kv_write(k, v, k_cache, v_cache, self.slots)
            ops.attention(
                q, k_cache, v_cache, self.table, self.row_slot, self.query_start, self.seq_lens, scale, 1, self.rows,
                self.num_splits, self.out,
            )  # fmt: skip

    def output(self, variant: Variant) -> Tensor:
        self.out.fill_(float("nan"))
        self.layer(variant, self.qkv.clone(), *self.caches[0])
        return self.out.clone()

    def step(self, variant: Variant) -> Callable[[], None]:
        qkv = self.qkv.clone()  # the three ops turn it in place, once more at every layer

        def run() -> None:
            for k_cache, v_cache in self.caches:
                self.layer(variant, qkv, k_cache, v_cache)

        return run


def times_us(step: Callable[[], None], samples: int) -> list[float]:
    """Microseconds per replay of a graph of `step`, a number of samples of at least 10 ms each."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replays(count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / count

    replays(1)
    count = min(max(int(10e3 / replays(2)), 2), 100)
    return [replays(count) for _ in range(samples)]


def measure(problem: Problem, variant: Variant, expected: Tensor, samples: int) -> Result:
    difference = float((problem.output(variant) - expected).abs().max())
    if not difference <= TOLERANCE:
        sys.exit(f"{variant.name} at {problem.rows} x {problem.context}: differs by {difference}, over {TOLERANCE}")
    times = [time / problem.num_layers for time in times_us(problem.step(variant), samples)]
    median = statistics.median(times)
    return Result(
        rows=problem.rows,
        context=problem.context,
        head_size=problem.head_size,
        num_splits=problem.num_splits,
        num_layers=problem.num_layers,
        variant=variant.name,
        us_per_layer=median,
        us_spread=max(times) - min(times),
        kv_tb_s=problem.kv_bytes / median / 1e6,
        max_difference=difference,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--max-context", type=int, default=4096, help="the block table's width, in tokens")
    parser.add_argument("--num-splits", type=int, help="instead of the engine's choice")
    parser.add_argument("--samples", type=int, default=5)
    args = parser.parse_args()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}, bf16, {NUM_HEADS}/{NUM_KV_HEADS} heads")
    results: list[Result] = []
    for head_size in HEAD_SIZES:
        for rows, context in SHAPES:
            problem = Problem(rows, context, head_size, args.max_context, args.num_splits)
            print(f"\nhead {head_size}, {rows} x {context}, {problem.num_splits} splits, {problem.num_layers} layers")
            expected = problem.output(VARIANTS[0])
            for variant in VARIANTS:
                if variant.merged and problem.num_splits == 1:
                    continue  # nothing to merge
                result = measure(problem, variant, expected, args.samples)
                results.append(result)
                print(
                    f"  {variant.name:26} {result.us_per_layer:8.2f} us a layer (+- {result.us_spread / 2:.2f})  "
                    f"{result.kv_tb_s:5.2f} TB/s  differs by {result.max_difference:.4f}",
                    flush=True,
                )
            del problem
            torch.cuda.empty_cache()
    if args.json:
        header = {"device": device, "torch": torch.__version__, "triton": triton.__version__}
        args.json.write_text(json.dumps(header | {"results": [asdict(result) for result in results]}, indent=1))


if __name__ == "__main__":
    main()
