"""The GPU's copy and read bandwidth: 4 GiB of random bits, the best of a few launch shapes. Needs CUDA and Triton."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

NUM_VALUES = 2**30  # 32-bit random values: far more than any cache holds


@triton.jit
def sum_kernel(x, out, num_elements, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, num_elements, tl.num_programs(0) * BLOCK):
        total += tl.load(x + start + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total))


def measure_bandwidth() -> dict[str, Any]:
    """In TB/s (10^12 bytes a second), with the name of the GPU."""
    x = torch.randn(NUM_VALUES, device="cuda").view(torch.bfloat16)
    y, out, num_bytes = torch.empty_like(x), torch.empty(4096, device="cuda"), x.numel() * 2
    copy = 2 * num_bytes / _milliseconds(lambda: y.copy_(x)) / 1e9

    def read(grid: int, block: int) -> float:
        return _milliseconds(lambda: sum_kernel[(grid,)](x, out, x.numel(), block, num_warps=8))

    fastest = min(read(grid, block) for block in (2048, 4096, 8192) for grid in (132, 264, 528, 1056, 2112))
    return {
        "gpu": torch.cuda.get_device_name(),
        "copy_tb_s": round(copy, 3),
        "read_tb_s": round(num_bytes / fastest / 1e9, 3),
    }


def work(job: dict[str, Any]) -> dict[str, Any]:
    if (device := torch.device(job["device"])).index is not None:
        torch.cuda.set_device(device)
    return measure_bandwidth()


def _milliseconds(launch: Callable[[], object], repeats: int = 10) -> float:
    launch()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        launch()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / repeats
