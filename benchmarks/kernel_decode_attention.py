"""Decode attention on a GPU: rope, cache write and attention as three ops, against the fused op and the two over tiles.

    python benchmarks/kernel_decode_attention.py --json results.json [--tune] [--rows 8,64]

`--tune` also times every config that `fused_config` could choose. (For a few rows a config has to be judged among the
kernels that it runs with: `tune_few.py` does that.)

Times one CUDA graph of many layers, each with a cache of its own, so that nothing is read twice from L2: at least 16
layers, and as many as it takes to pass 256 MiB of keys and values (at most 512). Prints microseconds per layer and the
rate at which keys and values are read; the difference from the three ops' output is checked first.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton
from torch import Tensor

from ostinato.kernels import ops
from ostinato.kernels.decode_tiles import block_cells, num_partial_floats, tile_config, tile_programs, tile_unit
from ostinato.kernels.splits import choose_num_splits
from ostinato.kernels.triton_decode_fused import FusedConfig, decode_attention, fused_config

SHAPES = [
    (1, 160),
    (1, 1024),
    (1, 32768),
    (8, 160),
    (8, 1024),
    (64, 160),
    (64, 1024),
    (64, 4096),
    (256, 160),
    (256, 1024),
]
"""Rows, context."""
HEADS = [(32, 8, 64), (16, 8, 128), (32, 8, 128)]  # query heads, key/value heads, head size
BLOCK_SIZE = 16
MIN_LAYERS, MAX_LAYERS, MIN_KV_BYTES = 16, 128, 256 * 2**20
TOLERANCE = 0.03  # bfloat16 output of values near 1


@dataclass(frozen=True, slots=True)
class Variant:
    """The fused op with a config; without one, the two ops over a list of tiles, or three ops."""

    name: str
    config: FusedConfig | None = None
    pdl: bool = False
    tiled: bool = False


def op_config(rows: int, num_heads: int, num_kv_heads: int, head_size: int) -> FusedConfig:
    return fused_config(rows, num_heads // num_kv_heads, head_size, head_size // 2, 2, norm=False)


def candidates(base: FusedConfig, head_size: int) -> list[Variant]:
    found = []
    for tile, num_warps, num_stages in itertools.product((32, 64, 128, 256), (4, 8), (1, 2, 3, 5)):
        if 8 <= tile * head_size // (32 * num_warps) <= 64:
            tiles = replace(base.tiles, tile=tile, num_warps=num_warps, num_stages=num_stages)
            name = f"tile {tile} warps {num_warps} stages {num_stages}"
            found.append(Variant(name, replace(base, tiles=tiles), pdl=True))
    return found


@dataclass(frozen=True, slots=True)
class Result:
    rows: int
    context: int
    num_heads: int
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

    def __init__(self, rows: int, context: int, heads: tuple[int, int, int], max_context: int, num_splits: int) -> None:
        device = torch.device("cuda")
        self.rows, self.context = rows, context
        self.num_heads, self.num_kv_heads, self.head_size = heads
        num_kv_heads, head_size = heads[1:]
        blocks = -(-context // BLOCK_SIZE)
        width = max(-(-max_context // BLOCK_SIZE), blocks)
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.num_splits = num_splits or choose_num_splits(rows, num_kv_heads, width, num_sms)
        self.kv_bytes = rows * context * num_kv_heads * head_size * 2 * 2
        self.num_layers = min(max(MIN_LAYERS, -(-MIN_KV_BYTES // self.kv_bytes)), MAX_LAYERS)
        shape = (rows * blocks + 1, 2, BLOCK_SIZE, num_kv_heads, head_size)
        pools = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(self.num_layers)]
        self.caches = [(pool[:, 0], pool[:, 1]) for pool in pools]
        self.qkv = torch.randn((rows, heads[0] + 2 * num_kv_heads, head_size), dtype=torch.bfloat16, device=device)
        self.out = torch.zeros((rows, heads[0], head_size), dtype=torch.bfloat16, device=device)
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
        self.counters = torch.zeros(rows * num_kv_heads, dtype=torch.int32, device=device)
        tiling = tile_config(head_size, 2, 2)
        tile = tiling.tile
        num_tiles = rows * -(-context // tile)
        self.tiles = ops.DecodeTiles(
            torch.zeros(rows + 1, dtype=torch.int32, device=device),
            torch.zeros((num_tiles, 2), dtype=torch.int32, device=device),
            torch.zeros((num_tiles, tile // tile_unit(tile, BLOCK_SIZE)), dtype=torch.int32, device=device),
            tile,
            tile_programs(tiling, num_kv_heads, num_sms),
            block_cells(self.caches[0][0]),
        )
        size = num_partial_floats(heads[0], num_kv_heads, head_size, num_sms)
        self.partials = torch.empty(size, dtype=torch.float32, device=device)

    def plan(self) -> None:
        """Once a step, for all layers."""
        rows = (self.seq_lens, self.query_start, self.table, self.row_slot)
        ops.plan_tiles(*rows, 1, self.rows, BLOCK_SIZE, self.tiles)

    def layer(self, variant: Variant, qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        scale = self.head_size**-0.5
        if variant.config is not None:
            decode_attention(
                q, k, v, self.positions, self.cos_sin, None, None, 0.0, self.slots, k_cache, v_cache,
                self.table, self.row_slot, self.seq_lens, scale, self.rows, self.num_splits, self.out, self.counters,
                variant.pdl, config=variant.config,
            )  # fmt: skip
        elif variant.tiled:
            ops.rope_write(q, k, v, self.positions, self.cos_sin, None, None, 0.0, self.slots, k_cache, v_cache)
            ops.attend_tiles(
                q, k_cache, v_cache, self.tiles, self.query_start, scale, 1, self.rows, self.out, self.counters,
                self.partials,
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
        self.plan()
        self.layer(variant, self.qkv.clone(), *self.caches[0])
        return self.out.clone()

    def step(self, variant: Variant) -> Callable[[], None]:
        qkv = self.qkv.clone()  # all but the fused op turn it in place, once more at every layer

        def run() -> None:
            if variant.tiled:
                self.plan()
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
        num_heads=problem.num_heads,
        head_size=problem.head_size,
        num_splits=problem.num_splits,
        num_layers=problem.num_layers,
        variant=variant.name,
        us_per_layer=median,
        us_spread=max(times) - min(times),
        kv_tb_s=problem.kv_bytes / median / 1e6,
        max_difference=difference,
    )


def compile_variant(case: tuple[tuple[int, int, int], Variant]) -> None:
    """In a process of its own: leaves the kernel in the cache on disk."""
    heads, variant = case
    for num_splits in (1, 2):
        problem = Problem(1, 160, heads, 1024, num_splits)
        with contextlib.suppress(Exception):  # what does not compile is seen again, and said, when it is timed
            problem.output(variant)


def show(result: Result) -> None:
    print(
        f"  {result.variant:38} {result.us_per_layer:8.2f} us a layer (+- {result.us_spread / 2:.2f})  "
        f"{result.kv_tb_s:5.2f} TB/s  differs by {result.max_difference:.4f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--max-context", type=int, default=4096, help="the block table's width, in tokens")
    parser.add_argument("--num-splits", default="0", help="several numbers of splits, 0 is the engine's choice")
    parser.add_argument("--rows", help="only these numbers of rows")
    parser.add_argument("--tune", action="store_true", help="time every config as well; the best ten are printed")
    parser.add_argument("--samples", type=int, default=5)
    args = parser.parse_args()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}, bf16")
    wanted = [(r, c) for r, c in SHAPES if args.rows is None or str(r) in args.rows.split(",")]
    if args.tune:
        cases = [(heads, variant) for heads in HEADS for variant in candidates(op_config(1, *heads), heads[2])]
        with ProcessPoolExecutor(14, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_variant, cases))
    results: list[Result] = []
    numbers = [int(number) for number in args.num_splits.split(",")]
    for heads, (rows, context), num_splits in itertools.product(HEADS, wanted, numbers):
        problem = Problem(rows, context, heads, args.max_context, num_splits)
        print(f"\nheads {heads}, {rows} x {context}, {problem.num_splits} splits, {problem.num_layers} layers")
        three = Variant("three ops")
        expected = problem.output(three)
        config = op_config(rows, *heads)
        fused = (Variant("fused", config), Variant("fused, pdl", config, pdl=True))
        for variant in (three, *fused, Variant("tiles", tiled=True)):
            results.append(measure(problem, variant, expected, args.samples))
            show(results[-1])
        if args.tune:
            tuned = []
            for variant in candidates(config, heads[2]):
                try:
                    tuned.append(measure(problem, variant, expected, 3))
                except triton.runtime.errors.OutOfResources as reason:
                    print(f"  {variant.name}: {reason}")
            results += tuned
            for result in sorted(tuned, key=lambda one: one.us_per_layer)[:10]:
                show(result)
        del problem
        torch.cuda.empty_cache()
    if args.json:
        header = {"device": device, "torch": torch.__version__, "triton": triton.__version__}
        args.json.write_text(json.dumps(header | {"results": [asdict(result) for result in results]}, indent=1))


if __name__ == "__main__":
    main()
