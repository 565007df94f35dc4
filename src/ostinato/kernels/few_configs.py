"""How the few-row projections are tiled: a table tuned on an H200, and a rule for the shapes that are not in it.

A choice depends on the shapes alone, so it is fixed when a graph is recorded. Measured inside a graph, over chains of
distinct weights larger than the L2 cache, by `benchmarks/tune_few.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["MAX_FEW_ROWS", "FewConfig", "Kind", "few_config"]

MAX_FEW_ROWS: Final = 8
"""The columns of the matrix instruction that `triton_few_dot` uses."""

Kind = Literal["norm", "gated", "residual"]
"""Norm and linear; norm, gate, up and SwiGLU's product; linear and residual add."""

_LINE_BYTES: Final = 128


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

    def num_programs(self, num_out: int, num_multiprocessors: int) -> int:
        """The launch grid: one wave, or fewer where there are not as many blocks."""
        return min(self.programs_per_sm * num_multiprocessors, _ceil_div(num_out, self.block_n))

    def tile(self, size: int, element_size: int) -> dict[str, int]:
        """The compile-time arguments which describe a tile."""
        block_bytes = self.block_n * size * element_size
        num_lines = _ceil_div(block_bytes, _LINE_BYTES) + (size * element_size % _LINE_BYTES != 0)
        lines = {"BLOCK_N": self.block_n, "PREFETCH_LINES": _next_power_of_2(num_lines)}
        if self.dot:
            return lines | {"SPLIT": self.num_warps, "WIDTH": self.block_k // self.num_warps}
        return lines | {"BLOCK_K": self.block_k}


def few_config(kind: Kind, num_out: int, size: int, num_rows: int) -> FewConfig:
    """The config of a projection [num_out, size] (gated: of each half) at 1 to MAX_FEW_ROWS rows."""
    rows = _next_power_of_2(num_rows)
    return _TUNED.get((kind, num_out, size, rows)) or _by_shape(kind, size, rows)


def _by_shape(kind: Kind, size: int, num_rows: int) -> FewConfig:
    """TODO"""
    whole = _next_power_of_2(size)
    if num_rows > 2:
        return FewConfig(16, 512, 4, 3, 1, dot=True)
    block_k = min(whole, 2048) if kind == "residual" else whole
    num_warps = min(max(block_k // 512, 1), 16)
    return FewConfig(2, block_k, num_warps, 4, 1)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


_TUNED: Final[dict[tuple[Kind, int, int, int], FewConfig]] = {
    ("norm", 3072, 2048, 1): FewConfig(4, 2048, 4, 4, 0),
    ("residual", 2048, 2048, 1): FewConfig(4, 1024, 4, 8, 1),
    ("gated", 8192, 2048, 1): FewConfig(1, 2048, 2, 16, 0),
    ("residual", 2048, 8192, 1): FewConfig(2, 4096, 8, 4, 0),
    ("norm", 128256, 2048, 1): FewConfig(4, 2048, 8, 4, 1),
    ("norm", 4096, 1024, 1): FewConfig(2, 1024, 1, 8, 0),
    ("residual", 1024, 2048, 1): FewConfig(4, 2048, 4, 8, 0),
    ("gated", 3072, 1024, 1): FewConfig(1, 1024, 1, 16, 0),
    ("residual", 1024, 3072, 1): FewConfig(8, 2048, 8, 1, 1),
    ("norm", 151936, 1024, 1): FewConfig(4, 1024, 4, 8, 1),
    ("norm", 6144, 4096, 1): FewConfig(4, 4096, 8, 2, 1),
    ("residual", 4096, 4096, 1): FewConfig(8, 2048, 8, 2, 0),
    ("gated", 14336, 4096, 1): FewConfig(1, 4096, 4, 4, 1),
    ("residual", 4096, 14336, 1): FewConfig(4, 8192, 16, 1, 1),
    ("norm", 128256, 4096, 1): FewConfig(2, 4096, 4, 8, 1),
}
