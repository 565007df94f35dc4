"""Tunes the products of some rows (`kernels.small_configs`) on a Hopper GPU, in each other's company.

    python benchmarks/tune_small.py results.json [--models llama-1b,...] [--rows 8,16,32,64,128,256] [--write FILE]

Every candidate is timed in a CUDA graph of whole layers (norm, QKV, attention, O, norm, gate and up, down) with
distinct weights, larger than the L2 cache, and the head. Candidates compile and are checked first, in parallel
processes; then the config of one product after another is replaced where that makes the step faster; cuBLAS with
separate ops is one of the candidates. Prints times and, with --write, puts what won into the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

import tune_few
from ostinato.kernels import ops, triton_small_gemm
from ostinato.kernels.small_configs import SmallConfig
from ostinato.kernels.small_tuned import TUNED
from tune_few import EPS, MODELS, READ_BYTES_PER_S, Heads, Model, random, record, replay_ms
from tuned_tables import write_table

CONTEXT: Final = 160
MAX_CONTEXT: Final = 512
PLACES: Final = ("qkv", "o", "gate_up", "down", "head")
GAIN: Final = 0.997
"""What a candidate's time over the best one's must be below."""


@dataclass(frozen=True, slots=True)
class Product:
    place: str
    num_out: int
    size: int

    @property
    def gated(self) -> bool:
        return self.place == "gate_up"

    @property
    def summed_later(self) -> bool:
        """Whether a norm behind it adds up its parts."""
        return self.place in ("o", "down")

    @property
    def kind(self) -> str:
        return "gated" if self.gated else "parts" if self.summed_later else "plain"


def products(one: Model) -> list[Product]:
    return [Product(place, s.num_out, s.size) for place, s in zip(PLACES, one.shapes, strict=True)]


def candidates(product: Product, num_rows: int, num_sms: int) -> Iterator[SmallConfig]:
    """Configs that keep enough bytes on their way and enough programs busy, by an estimate."""
    blocks_m = [16] if num_rows <= 16 else [32] if num_rows <= 32 else [64] if num_rows <= 64 else [64, 128]
    halves = 2 if product.gated else 1
    parts = (1, 2, 3, 4, 6, 8) if product.summed_later else (1,)
    for bm, bn, bk, count in itertools.product(blocks_m, (16, 32, 64, 128), (64, 128), parts):
        step = (bm + halves * bn) * bk * 2
        blocks_n = -(-product.num_out // bn)
        programs = -(-num_rows // bm) * blocks_n * count
        if product.size // count < 2 * bk or programs < 0.45 * num_sms or bm * bn * halves > 128 * 128:
            continue
        if programs > (3 if count > 1 else 5) * num_sms and bn < (128 if count > 1 else 64) // halves:
            continue
        few_outputs = bm * bn <= 16 * 64
        warps = 8 if bm * bn * halves >= 128 * 128 else 4
        # Two programs a multiprocessor, each with a few steps on their way; or one with twice as many.
        budget = 100 * 1024 if programs > num_sms else 200 * 1024
        num_stages = max(min(budget // step, 3 if few_outputs and bk == 128 else 6), 2)
        for turned in (False, True):
            if turned and bn < 64:
                continue
            yield SmallConfig(bm, bn, bk, count, warps, num_stages, turned, min(512, _pow2(product.size // count)))
            if few_outputs and bk == 128 and budget // step >= 6:
                yield SmallConfig(bm, bn, bk, count, warps, 6, turned, min(512, _pow2(product.size // count)))


def _pow2(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def out_of(product: Product, num_rows: int, config: SmallConfig | None) -> Tensor:
    if config is not None and product.summed_later:
        return torch.empty((config.num_parts, num_rows, product.num_out), device="cuda")
    return torch.empty((num_rows, product.num_out), device="cuda", dtype=torch.bfloat16)


def check(case: tuple[Product, int, SmallConfig]) -> str:
    """Compiles a candidate and compares it with float64: empty, or what is wrong."""
    product, num_rows, config = case
    num_out = min(product.num_out, 5 * config.block_n + (0 if product.num_out % config.block_n == 0 else 8))
    torch.manual_seed(product.size + num_rows)
    try:
        x = random(num_rows, product.size)
        weight = random(num_out * (2 if product.gated else 1), product.size, scale=product.size**-0.5)
        small = replace(product, num_out=num_out)
        out = out_of(small, num_rows, config)
        triton_small_gemm.launch(config, x, weight, None, out, gated=product.gated)
        exact = F.linear(x.double(), weight.double())
        if product.gated:
            exact = F.silu(exact[:, :num_out]) * exact[:, num_out:]
        found = out.double().sum(0) if product.summed_later else out.double()
        error = float((found - exact).norm() / exact.norm())
    except Exception as reason:  # a candidate that does not compile is no candidate
        return repr(reason)[:300]
    return "" if error < 0.01 else f"relative error {error}"


class Step:
    """The layers and the head of one model at some number of rows, with a config for each product (None: cuBLAS)."""

    def __init__(self, one: Model, num_rows: int, pool: Tensor) -> None:
        self.one, self.num_rows, self.products = one, num_rows, products(one)
        self.norm = 1 + random(16384, scale=0.1)
        self.heads = Heads(one, num_rows, one.num_layers, MAX_CONTEXT)
        self.heads.set_context(CONTEXT)
        self.stream = random(num_rows, one.layer[0].size)
        self.weights: dict[str, list[Tensor]] = {}
        begin = 0
        for place, shape in zip(PLACES, one.shapes, strict=True):
            count = 1 if place == "head" else one.num_layers
            each = shape.weight_rows * shape.size
            self.weights[place] = list(pool[begin : begin + count * each].view(count, shape.weight_rows, shape.size))
            begin += count * each
        self.configs: dict[str, SmallConfig | None] = dict.fromkeys(PLACES)

    def ms(self) -> float:
        graph = record(self._run)
        self.stream.normal_()
        return replay_ms(graph)

    def _run(self) -> None:
        heads, stream = self.heads, self.stream
        attended = heads.out.view(self.num_rows, -1)
        qkv = heads.qkv.view(self.num_rows, -1)
        delta: Tensor | None = None
        for layer in range(self.one.num_layers):
            self._product("qkv", layer, self._normed(delta), qkv)
            heads.attend(self.attention, layer, heads.out)
            delta = self._product("o", layer, attended)
            normed = self._normed(delta)
            delta = self._product("down", layer, self._product("gate_up", layer, normed))
        self._product("head", 0, self._normed(delta))
        stream.clamp_(-4, 4)

    @property
    def attention(self) -> Any:
        return tune_few.attention_candidates(self.one, self.num_rows)[0]

    def _normed(self, delta: Tensor | None) -> Tensor:
        weight = self.norm[: self.stream.shape[1]]
        if delta is None:
            return ops.rms_norm(self.stream, weight, EPS)
        if delta.dim() == 3:
            return ops.add_parts_rms_norm(delta, self.stream, weight, EPS)
        return ops.add_rms_norm(delta, self.stream, weight, EPS)

    def _product(self, place: str, layer: int, x: Tensor, out: Tensor | None = None) -> Tensor:
        product, config, weight = self.products[PLACES.index(place)], self.configs[place], self.weights[place][layer]
        if config is None:
            if product.gated:
                return ops.silu_mul(F.linear(x, weight))
            return F.linear(x, weight) if out is None else torch.mm(x, weight.t(), out=out)
        out = out_of(product, self.num_rows, config) if out is None else out
        triton_small_gemm.launch(config, x, weight, None, out, gated=product.gated)
        return out


def tune(step: Step, options: dict[str, list[SmallConfig]], deadline: float) -> dict[str, Any]:
    """Leaves the best configs in the step."""
    times = {"cublas": step.ms()}
    tried: dict[str, list[tuple[float, Any]]] = {place: [] for place in PLACES}
    best = times["cublas"]

    def consider(place: str, config: SmallConfig | None) -> None:
        nonlocal best
        if time.time() > deadline:
            return
        old, step.configs[place] = step.configs[place], config
        taken = step.ms()
        tried[place].append((taken, None if config is None else astuple(config)))
        if taken < best * GAIN:
            taken = max(taken, step.ms())  # once more: a lucky run must not win
        if taken < best * GAIN:
            best = taken
        else:
            step.configs[place] = old

    for place in ("gate_up", "down", "qkv", "o", "head"):
        for config in options[place]:
            consider(place, config)
    times["tilings"] = best
    for place in ("gate_up", "down", "qkv", "o"):  # again, among the best, now that the others start early too
        for _, fields in sorted((t for t in tried[place] if t[1] is not None), key=lambda t: t[0])[:6]:
            consider(place, SmallConfig(*fields))
        chosen = step.configs[place]
        if chosen is not None:
            size = step.products[PLACES.index(place)].size // chosen.num_parts
            for count in (0, 256, 1024, 2048):
                if count <= size:
                    consider(place, replace(chosen, prefetch=count))
        consider(place, None)
    times["final"] = step.ms()
    return {"ms": times, "tried": {p: sorted(t, key=lambda e: e[0])[:12] for p, t in tried.items()},
            "count": sum(map(len, tried.values()))}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--models", default=",".join(one.name for one in MODELS))
    parser.add_argument("--rows", default="8,16,32,64,128,256")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--write", type=Path, help="small_tuned.py, in which the rows of these shapes are replaced")
    args = parser.parse_args()
    started = time.time()
    models = [one for one in MODELS if one.name in args.models.split(",")]
    rows = [int(number) for number in args.rows.split(",")]
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    options = {
        (one.name, num_rows, product.place): list(candidates(product, num_rows, num_sms))
        for one in models
        for num_rows in rows
        for product in products(one)
    }
    unique: dict[Any, tuple[Product, int, SmallConfig]] = {}
    for one in models:
        for num_rows, product in itertools.product(rows, products(one)):
            for config in options[one.name, num_rows, product.place]:
                key = (product.kind, product.num_out % config.block_n == 0, replace(config, num_parts=1))
                unique.setdefault(key, (product, num_rows, config))
    with ProcessPoolExecutor(15, mp_context=multiprocessing.get_context("spawn")) as pool:
        verdicts = dict(zip(unique, pool.map(check, unique.values(), chunksize=4), strict=True))
    bad = {repr(key): text for key, text in verdicts.items() if text}
    print(f"{len(unique)} kernels, {len(bad)} bad, {time.time() - started:.0f} s", list(bad.items())[:3], flush=True)

    weights = torch.empty(max(one.num_bytes for one in models) // 2, device="cuda", dtype=torch.bfloat16)
    weights.normal_(std=0.02)
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "bad": bad, "steps": []}
    cases = list(itertools.product(models, rows))
    for number, (one, num_rows) in enumerate(cases):
        left = args.seconds + started - time.time()
        step = Step(one, num_rows, weights)
        good = {}
        for product in step.products:
            found = options[one.name, num_rows, product.place]
            even = {c: product.num_out % c.block_n == 0 for c in found}
            good[product.place] = [c for c in found if not verdicts[product.kind, even[c], replace(c, num_parts=1)]]
        result = tune(step, good, time.time() + left / (len(cases) - number))
        configs = {place: None if c is None else astuple(c) for place, c in step.configs.items()}
        for product in step.products:
            TUNED[product.kind, product.num_out, product.size, num_rows] = configs[product.place]
        floor = one.num_bytes / READ_BYTES_PER_S * 1e3
        report["steps"].append(
            {"model": one.name, "rows": num_rows, "layers": one.num_layers, "floor_ms": floor, "configs": configs}
            | result
        )  # fmt: skip
        print(one.name, num_rows, f"floor {floor:.4f}", result["ms"], result["count"], configs, flush=True)
        args.results.write_text(json.dumps(report))
        if args.write is not None:
            write_table(args.write, "TUNED", TUNED)
        del step
        torch.cuda.empty_cache()
    print(f"done at {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
