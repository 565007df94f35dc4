"""How the few-row projections are tiled: a table tuned on an H200, and a rule for the shapes that are not in it.

A choice depends on the shapes alone, so it is fixed when a graph is recorded. Measured inside a graph, over chains of
distinct weights larger than the L2 cache, by `benchmarks/tune_few.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ostinato.kernels.few_tuned import TUNED

__all__ = ["MAX_FEW_ROWS", "FewConfig", "Kind", "few_config", "max_few_rows"]

MAX_FEW_ROWS: Final = 4
"""What the kernels take. A step of a 1B model takes 0.64, 0.73 and 0.83 ms at 1, 2 and 4 rows, and 0.96 to 0.98 with
cuBLAS and separate ops; at 8 rows (tensor cores only) it would take 1.14."""

Kind = Literal["norm", "gated", "residual"]
"""Norm and linear; norm, gate, up and SwiGLU's product; linear and residual add."""

_MANY_OUTPUTS: Final = 32_768


@dataclass(frozen=True, slots=True)
class FewConfig:
    """The kernel and the tiling of one projection [num_out, size]."""

    block_n: int
    """Output rows of a tile (gated: of the gate, and as many of up)."""
    block_k: int
    """Inputs of a tile, a power of two. With a norm in front and multiply-adds, not below `size`."""
    num_warps: int
    programs_per_sm: int
    """Programs per multiprocessor: at most so many, each of which walks over the output rows."""
    prefetch: int
    """Blocks of output rows asked for in L2 before the wait, beside the tile that is loaded."""
    dot: bool = False
    """Tensor cores instead of multiply-adds: `block_n` from 16 on, and `block_k` is split among the warps."""
    max_registers: int | None = None
    """Of a thread. A kernel that fills the registers of a multiprocessor keeps its successor from starting early."""

    def num_programs(self, num_out: int, num_multiprocessors: int) -> int:
        """The launch grid: one wave, or fewer where there are not as many blocks."""
        return min(self.programs_per_sm * num_multiprocessors, _ceil_div(num_out, self.block_n))

    def tile(self) -> dict[str, int]:
        """The compile-time arguments which describe a tile."""
        if self.dot:
            return {"BLOCK_N": self.block_n, "SPLIT": self.num_warps, "WIDTH": self.block_k // self.num_warps}
        return {"BLOCK_N": self.block_n, "BLOCK_K": self.block_k}


def max_few_rows(hidden_size: int) -> int:
    """The most rows at which the few-row projections of a model beat cuBLAS and the separate ops. From hidden size
    4096 on there are enough weights for cuBLAS to stream well: an 8B model's step takes 3.5, 3.9 and 4.7 ms at 1, 2 and
    4 rows, and 4.4 with the separate ops.
    """
    return MAX_FEW_ROWS if hidden_size < 4096 else 2


def few_config(kind: Kind, num_out: int, size: int, num_rows: int) -> FewConfig:
    """The config of a projection [num_out, size] (gated: of each half) at 1 to MAX_FEW_ROWS rows."""
    rows = _next_power_of_2(num_rows)
    tuned = TUNED.get((kind, num_out, size, rows))
    return _by_shape(kind, num_out, size, rows) if tuned is None else FewConfig(*tuned)


def _by_shape(kind: Kind, num_out: int, size: int, num_rows: int) -> FewConfig:
    """What the table's rows have in common: 16 of a row's numbers for each thread, and 16 warps per multiprocessor."""
    whole = _next_power_of_2(max(size, 16))
    fits_shared = 512 <= whole <= 8192
    if num_rows > 2 and fits_shared and (kind != "norm" or num_out > _MANY_OUTPUTS):
        if kind == "residual":
            return FewConfig(8, min(whole, 1024), 8, 2, 0, dot=True)
        return FewConfig(16 if kind == "norm" else 8, 256, 4, 4, 0, dot=True)
    block_k = min(whole, 2048) if kind == "residual" else whole
    num_warps = min(max(block_k // 512, 1), 16)
    few_tiles = kind == "gated" or num_rows > 2 or whole > 8192
    return FewConfig(1 if few_tiles else 2, block_k, num_warps, max(16 // num_warps, 1), 1)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
