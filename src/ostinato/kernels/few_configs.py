"""How the few-row projections are tiled: a table tuned on an H200, and a rule for the shapes that are not in it.

A choice depends on the shapes alone, so it is fixed when a graph is recorded. Measured inside a graph, over chains of
distinct weights larger than the L2 cache, by `benchmarks/tune_few.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

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
    ahead_bytes: int = 0
    """Of the next projection's weights, asked for in L2 before the wait (residual only)."""

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
    return _TUNED.get((kind, num_out, size, rows)) or _by_shape(kind, num_out, size, rows)


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


# (kind, num_out, size, rows); QKV, O, gate and up, down, head.
_TUNED: Final[dict[tuple[Kind, int, int, int], FewConfig]] = {
    # Llama-3.2-1B
    ("norm", 3072, 2048, 1): FewConfig(4, 2048, 8, 3, 0),
    ("residual", 2048, 2048, 1): FewConfig(4, 2048, 4, 6, 0),
    ("gated", 8192, 2048, 1): FewConfig(1, 2048, 2, 16, 0),
    ("residual", 2048, 8192, 1): FewConfig(2, 4096, 8, 4, 0),
    ("norm", 128256, 2048, 1): FewConfig(4, 2048, 4, 8, 0, max_registers=96),
    ("norm", 3072, 2048, 2): FewConfig(1, 2048, 2, 8, 0),
    ("residual", 2048, 2048, 2): FewConfig(4, 1024, 4, 8, 1),
    ("gated", 8192, 2048, 2): FewConfig(2, 2048, 4, 4, 0),
    ("residual", 2048, 8192, 2): FewConfig(2, 8192, 8, 2, 0),
    ("norm", 128256, 2048, 2): FewConfig(4, 2048, 4, 8, 1),
    ("norm", 3072, 2048, 4): FewConfig(2, 2048, 4, 4, 0),
    ("residual", 2048, 2048, 4): FewConfig(8, 1024, 8, 3, 1, dot=True),
    ("gated", 8192, 2048, 4): FewConfig(8, 256, 4, 4, 0, dot=True),
    ("residual", 2048, 8192, 4): FewConfig(8, 1024, 8, 2, 0, dot=True),
    ("norm", 128256, 2048, 4): FewConfig(16, 256, 4, 4, 0, dot=True),
    # Qwen3-0.6B
    ("norm", 4096, 1024, 1): FewConfig(2, 1024, 1, 8, 0),
    ("residual", 1024, 2048, 1): FewConfig(4, 2048, 4, 8, 0),
    ("gated", 3072, 1024, 1): FewConfig(2, 1024, 4, 8, 0, max_registers=64),
    ("residual", 1024, 3072, 1): FewConfig(2, 2048, 8, 4, 0, max_registers=96),
    ("norm", 151936, 1024, 1): FewConfig(4, 1024, 4, 8, 1),
    ("norm", 4096, 1024, 2): FewConfig(2, 1024, 1, 8, 0),
    ("residual", 1024, 2048, 2): FewConfig(4, 1024, 4, 8, 1),
    ("gated", 3072, 1024, 2): FewConfig(1, 1024, 1, 8, 1),
    ("residual", 1024, 3072, 2): FewConfig(4, 2048, 8, 4, 0),
    ("norm", 151936, 1024, 2): FewConfig(4, 1024, 2, 16, 1),
    ("norm", 4096, 1024, 4): FewConfig(2, 1024, 2, 8, 0),
    ("residual", 1024, 2048, 4): FewConfig(2, 1024, 4, 8, 0),
    ("gated", 3072, 1024, 4): FewConfig(1, 1024, 2, 8, 0),
    ("residual", 1024, 3072, 4): FewConfig(2, 1024, 4, 4, 0),
    ("norm", 151936, 1024, 4): FewConfig(32, 256, 4, 4, 0, dot=True),
    # Llama-3.1-8B
    ("norm", 6144, 4096, 1): FewConfig(2, 4096, 8, 4, 0, max_registers=80),
    ("residual", 4096, 4096, 1): FewConfig(8, 2048, 8, 2, 0),
    ("gated", 14336, 4096, 1): FewConfig(1, 4096, 4, 8, 0),
    ("residual", 4096, 14336, 1): FewConfig(4, 8192, 16, 1, 1),
    ("norm", 128256, 4096, 1): FewConfig(2, 4096, 8, 4, 0, max_registers=64),
    ("norm", 6144, 4096, 2): FewConfig(4, 4096, 8, 2, 1),
    ("residual", 4096, 4096, 2): FewConfig(4, 4096, 8, 2, 1),
    ("gated", 14336, 4096, 2): FewConfig(2, 4096, 8, 4, 0),
    ("residual", 4096, 14336, 2): FewConfig(4, 2048, 8, 1, 1),
    ("norm", 128256, 4096, 2): FewConfig(4, 4096, 8, 4, 2),
    ("norm", 6144, 4096, 4): FewConfig(2, 4096, 8, 2, 1),
    ("residual", 4096, 4096, 4): FewConfig(16, 512, 8, 2, 0, dot=True),
    ("gated", 14336, 4096, 4): FewConfig(8, 512, 4, 2, 0, dot=True),
    ("residual", 4096, 14336, 4): FewConfig(8, 1024, 8, 2, 0, dot=True),
    ("norm", 128256, 4096, 4): FewConfig(32, 256, 4, 4, 0, dot=True),
}
