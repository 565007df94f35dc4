"""Tunes the few-row projections on a Hopper GPU, checks each candidate, and times whole steps of them.

    python benchmarks/tune_few.py results.json [--seconds 150]

Every time is that of a CUDA graph over a chain of distinct weights larger than the L2 cache. Three stages: all
candidates compile and are checked, in parallel processes; each shape's candidates are timed in chains of that shape
alone; then the best few of each shape compete inside a step of their model (QKV, O, gate and up, down, layer by
layer, and the head), one shape at a time. Prints the rows of `few_configs` and, beside them, a step of cuBLAS calls
and separate ops.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.kernels import ops, reference_few, triton_few
from ostinato.kernels.few_configs import FewConfig, Kind, few_config

EPS: Final = 1e-5
READ_BYTES_PER_S: Final = 4.61e12
CHAIN_BYTES: Final = 300e6
ROWS: Final = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Shape:
    kind: Kind
    num_out: int
    size: int

    @property
    def weight_rows(self) -> int:
        return self.num_out * (2 if self.kind == "gated" else 1)

    @property
    def num_bytes(self) -> int:
        return 2 * self.weight_rows * self.size


@dataclass(frozen=True, slots=True)
class Model:
    """A model's projections, in the order of a step."""

    name: str
    num_layers: int
    layer: tuple[Shape, Shape, Shape, Shape]
    head: Shape

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (*self.layer, self.head)

    @property
    def num_bytes(self) -> int:
        return self.num_layers * sum(shape.num_bytes for shape in self.layer) + self.head.num_bytes


def model(name: str, num_layers: int, hidden: int, query: int, key: int, inner: int, vocabulary: int) -> Model:
    layer = (
        Shape("norm", query + 2 * key, hidden),
        Shape("residual", hidden, query),
        Shape("gated", inner, hidden),
        Shape("residual", hidden, inner),
    )
    return Model(name, num_layers, layer, Shape("norm", vocabulary, hidden))


MODELS: Final = (
    model("llama-1b", 16, 2048, 2048, 512, 8192, 128256),
    model("qwen3-0.6b", 28, 1024, 2048, 1024, 3072, 151936),
    model("llama-8b", 32, 4096, 4096, 1024, 14336, 128256),
)


def tilings(kind: Kind, size: int, num_rows: int) -> Iterator[FewConfig]:
    """Configs, one program per multiprocessor, that keep 16-byte loads and fit the registers, by an estimate."""
    whole = 1 << (size - 1).bit_length()
    halves = 2 if kind == "gated" else 1
    if num_rows <= 4:
        blocks_k = (
            [whole] if kind != "residual" else [k for k in (1024, 2048, 4096, 8192, 16384) if size / 7 <= k <= whole]
        )
        for block_k, num_warps, block_n in itertools.product(blocks_k, (1, 2, 4, 8, 16), (1, 2, 4, 8)):
            row = block_k // (32 * num_warps)  # numbers of one row that a thread holds
            tile = row * block_n * halves
            sums = tile * num_rows if block_k < size else row * num_rows
            if row in (8, 16, 32) and 16 <= tile <= 64 and sums <= 96 and tile + sums <= 128:
                yield FewConfig(block_n, block_k, num_warps, 1, 1)
    if num_rows > 1:
        for width, num_warps, block_n in itertools.product((32, 64, 128), (4, 8, 16), (8, 16, 32)):
            tile = block_n * width * halves // 32
            block_k = width * num_warps
            if 16 <= tile <= 128 and size / 16 <= block_k <= whole:
                yield FewConfig(block_n, block_k, num_warps, 1, 1, dot=True)


def resident(config: FewConfig) -> list[int]:
    """Programs per multiprocessor worth trying: 8 to 32 warps, on tensor cores 4 to 16."""
    sizes = (4, 8, 16, 24) if config.dot else (8, 16, 24, 32)
    return sorted({max(num_warps // config.num_warps, 1) for num_warps in sizes})


def launch(config: FewConfig | None, shape: Shape, x: Tensor, norm: Tensor, weight: Tensor, out: Tensor) -> None:
    """One projection; without a config, the op's own."""
    config = config or few_config(shape.kind, shape.num_out, shape.size, x.shape[0])
    triton_few.launch(config, shape.kind, x, None if shape.kind == "residual" else norm, weight, None, EPS, out)


def reference(shape: Shape, x: Tensor, norm: Tensor, weight: Tensor, out: Tensor) -> None:
    if shape.kind == "residual":
        reference_few.few_linear_residual(x, weight, None, out)
    elif shape.kind == "gated":
        reference_few.few_gate_up_silu(x, norm, weight, None, EPS, out)
    else:
        reference_few.few_norm_linear(x, norm, weight, None, EPS, out)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale


def check(candidate: tuple[Kind, int, int, FewConfig]) -> str:
    """Compiles a candidate and compares it with the reference in float64: empty, or what is wrong."""
    kind, size, num_rows, config = candidate
    shape = Shape(kind, 304 * config.block_n, size)  # two or three blocks a program
    torch.manual_seed(size + num_rows)
    x, norm = random(num_rows, size), 1 + random(size, scale=0.1)
    weight, out = random(shape.weight_rows, size, scale=size**-0.5), random(num_rows, shape.num_out)
    exact = out.double()
    reference(shape, x.double(), norm.double(), weight.double(), exact)
    try:
        launch(config, shape, x, norm, weight, out)
    except Exception as reason:  # a candidate that does not compile is no candidate
        return repr(reason)
    error = float((out.double() - exact).norm() / exact.norm())
    return "" if error < 0.01 else f"relative error {error}"


def graph_ms(run: Callable[[], None], replays: int) -> float:
    """Median time of `run` inside a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):  # not torch.cuda.graph: that collects garbage and empties the cache every time
        graph.capture_begin()
        run()
        graph.capture_end()
    graph.replay()
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / replays)
    return float(sorted(times)[2])


class Tuner:
    """Times configs, and keeps the best of each (kind, outputs, inputs, rows)."""

    def __init__(self, seconds: float, started: float) -> None:
        self.deadline = started + seconds
        # Every weight is a view of it.
        self.pool = torch.empty(8_100_000_000, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)
        self.norm = 1 + random(16384, scale=0.1)
        self.ranking: dict[tuple[Shape, int], list[tuple[float, FewConfig]]] = {}

    def late(self) -> bool:
        return time.time() > self.deadline

    def views(self, shape: Shape, count: int, begin: int = 0) -> list[Tensor]:
        """`count` distinct weights from number `begin` of the pool on."""
        each = shape.weight_rows * shape.size
        return list(self.pool[begin : begin + count * each].view(count, shape.weight_rows, shape.size))

    def chain_us(self, shape: Shape, num_rows: int, config: FewConfig) -> float:
        weights = self.views(shape, max(2, round(CHAIN_BYTES / shape.num_bytes)))
        x, out = random(num_rows, shape.size), random(num_rows, shape.num_out)

        def run() -> None:
            for weight in weights:
                launch(config, shape, x, self.norm[: shape.size], weight, out)

        return graph_ms(run, 3) * 1e3 / len(weights)

    def rank(self, shape: Shape, num_rows: int, good: list[FewConfig]) -> None:
        """All tilings at one prefetch depth, then the best of them at others."""
        timed = [
            (self.chain_us(shape, num_rows, config), config)
            for tiling in good
            for config in (replace(tiling, programs_per_sm=programs) for programs in resident(tiling))
        ]
        timed.sort(key=lambda entry: entry[0])
        for _, config in timed[:3]:
            for prefetch in (0, 2, 4):
                other = replace(config, prefetch=prefetch)
                timed.append((self.chain_us(shape, num_rows, other), other))
        self.ranking[shape, num_rows] = sorted(timed, key=lambda entry: entry[0])

    def step_ms(self, one: Model, num_rows: int, project: Callable[..., None], replays: int = 2) -> float:
        """A step's projections, each reading what the one before wrote."""
        hidden, query = one.layer[0].size, one.layer[1].size
        residual = random(num_rows, hidden)
        buffers = [random(num_rows, shape.num_out) for shape in one.shapes]
        layers, begin = [], 0
        for shape in one.layer:
            layers.append(self.views(shape, one.num_layers, begin))
            begin += one.num_layers * shape.weight_rows * shape.size
        (head,) = self.views(one.head, 1, begin)

        def run() -> None:
            for i in range(one.num_layers):
                for j, shape in enumerate(one.layer):
                    x = residual if j in (0, 2) else buffers[0][:, :query] if j == 1 else buffers[2]
                    out = buffers[j] if j in (0, 2) else residual
                    project(shape, x, self.norm[: shape.size], layers[j][i], out)
            project(one.head, residual, self.norm[:hidden], head, buffers[4])

        return graph_ms(run, replays)

    def refine(self, one: Model, num_rows: int, chosen: dict[Shape, FewConfig]) -> float:
        """Replaces one config at a time where that makes the whole step faster. Returns the step's time."""

        def project(shape: Shape, *tensors: Tensor) -> None:
            launch(chosen[shape], shape, *tensors)

        best = self.step_ms(one, num_rows, project)
        for shape in one.shapes:
            for _, config in self.ranking[shape, num_rows][1:8]:
                if self.late():
                    return best
                kept, chosen[shape] = chosen[shape], config
                taken = self.step_ms(one, num_rows, project)
                if taken < best * 0.998:
                    best = taken
                else:
                    chosen[shape] = kept
        return best


def unfused(shape: Shape, x: Tensor, norm: Tensor, weight: Tensor, out: Tensor) -> None:
    """The separate ops."""
    if shape.kind == "residual":
        out.add_(F.linear(x, weight))
    elif shape.kind == "gated":
        ops.silu_mul(F.linear(ops.rms_norm(x, norm, EPS), weight))
    else:
        torch.mm(ops.rms_norm(x, norm, EPS), weight.t(), out=out)


def cublas(shape: Shape, x: Tensor, norm: Tensor, weight: Tensor, out: Tensor) -> None:
    """The matrix products alone."""
    F.linear(x, weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results")
    parser.add_argument("--seconds", type=float, default=150)
    options = parser.parse_args()
    started = time.time()
    candidates = [
        (kind, size, num_rows, config)
        for kind, size in sorted({(shape.kind, shape.size) for one in MODELS for shape in one.shapes})
        for num_rows in ROWS
        for config in tilings(kind, size, num_rows)
    ]
    with ProcessPoolExecutor(14, multiprocessing.get_context("spawn")) as pool:
        verdicts = dict(zip(candidates, pool.map(check, candidates, chunksize=1), strict=True))
    bad = {str(candidate): verdict for candidate, verdict in verdicts.items() if verdict}
    print(f"checked {len(candidates)} in {time.time() - started:.0f} s; bad: {len(bad)}", *list(bad.items())[:3])

    tuner = Tuner(options.seconds, started)
    report: dict[str, Any] = {"bad": bad, "shapes": [], "steps": []}
    for num_rows, one in itertools.product(ROWS, MODELS):
        for shape in one.shapes:
            good = [c[3] for c in candidates if c[:3] == (shape.kind, shape.size, num_rows) and not verdicts[c]]
            tuner.rank(shape, num_rows, good)
            entries = tuner.ranking[shape, num_rows]
            report["shapes"].append([one.name, *astuple(shape), num_rows, [(us, *astuple(c)) for us, c in entries]])
            us, best = entries[0]
            print(f"{one.name} {shape.kind} {shape.num_out}x{shape.size} T={num_rows} {us:.2f} us "
                  f"{shape.num_bytes / us / 1e6:.2f} TB/s {astuple(best)}", flush=True)  # fmt: skip
        if tuner.late():
            break
    print(f"ranked at {time.time() - started:.0f} s")
    for num_rows, one in itertools.product(ROWS, MODELS):
        if any(not tuner.ranking.get((shape, num_rows)) for shape in one.shapes):
            continue
        chosen = {shape: tuner.ranking[shape, num_rows][0][1] for shape in one.shapes}
        alone = partial(lambda configs, shape, *tensors: launch(configs[shape], shape, *tensors), dict(chosen))
        times = {
            "floor": one.num_bytes / READ_BYTES_PER_S * 1e3,
            "cublas": tuner.step_ms(one, num_rows, cublas),
            "unfused": tuner.step_ms(one, num_rows, unfused),
            "table": tuner.step_ms(one, num_rows, partial(launch, None)),
            "ranked": tuner.step_ms(one, num_rows, alone),
            "refined": tuner.refine(one, num_rows, chosen),
        }
        configs = [(*astuple(shape), num_rows, *astuple(config)) for shape, config in chosen.items()]
        report["steps"].append({"model": one.name, "rows": num_rows, "ms": times, "configs": configs})
        print(one.name, f"T={num_rows}", " ".join(f"{name} {ms:.4f}" for name, ms in times.items()), flush=True)
        for row in configs:
            print("   ", row, flush=True)
    with open(options.results, "w") as file:
        json.dump(report, file)
    print(f"done at {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
