"""The GPU's copy and read bandwidth in TB/s, as JSON: 4 GiB of random bits, the best of a few launch shapes."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit
def sum_kernel(x, out, num_elements, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, num_elements, tl.num_programs(0) * BLOCK):
        total += tl.load(x + start + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total))


def milliseconds(launch: Callable[[], object], repeats: int = 10) -> float:
    launch()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        launch()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def main() -> None:
    x = torch.randn(2**30, device="cuda").view(torch.bfloat16)
    y, out, num_bytes = torch.empty_like(x), torch.empty(4096, device="cuda"), x.numel() * 2
    copy = 2 * num_bytes / milliseconds(lambda: y.copy_(x)) / 1e9
    read = max(
        num_bytes / milliseconds(lambda g=grid, b=block: sum_kernel[(g,)](x, out, x.numel(), b, num_warps=8)) / 1e9
        for block in (2048, 4096, 8192)
        for grid in (132, 264, 528, 1056, 2112)
    )
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "copy_tb_s": round(copy, 3), "read_tb_s": round(read, 3)}))


if __name__ == "__main__":
    main()
