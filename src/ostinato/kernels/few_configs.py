"""How the few-row projections are tiled: a table tuned on an H200, and a rule for the shapes that are not in it.

A choice depends on the shapes alone, so it is fixed when a graph is recorded. Measured inside a graph, over chains of
distinct weights larger than the L2 cache, by `benchmarks/tune_few.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["MAX_FEW_ROWS", "FewConfig", "Kind", "few_config"]

MAX_FEW_ROWS: Final = 4
"""More rows than this take a matrix product: the sums of products would outlast the stream of weights."""

Kind = Literal["norm", "gated", "residual"]
"""Norm and linear; norm, gate, up and SwiGLU's product; linear and residual add."""

_LINE_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class FewConfig:
    """The tiling of one projection [num_out, size]."""

    block_n: int
    """Output rows of a tile (gated: of the gate, and as many of up)."""
    block_k: int
    """Inputs of a tile, a power of two; with a norm in front not below `size`."""
    num_warps: int
    programs_per_sm: int
    """Programs per multiprocessor: at most so many, each of which walks over the output rows."""
    prefetch: int
    """Blocks of output rows asked for in L2 before the wait, beside the tile that is loaded."""

    def num_programs(self, num_out: int, num_multiprocessors: int) -> int:
        """The launch grid: one wave, or fewer where there are not as many blocks."""
        return min(self.programs_per_sm * num_multiprocessors, _ceil_div(num_out, self.block_n))

    def compile_time(self, size: int, num_rows: int, element_size: int) -> dict[str, int]:
        """The compile-time arguments that both kernels share."""
        lines = _ceil_div(self.block_n * size * element_size, _LINE_BYTES) + 1  # one more: rows need not be aligned
        return {
            "SIZE": size,
            "T": num_rows,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "PREFETCH_LINES": _next_power_of_2(lines - (lines > 1 and size * element_size % _LINE_BYTES == 0)),
        }


def few_config(kind: Kind, num_out: int, size: int, num_rows: int) -> FewConfig:
    """The config of a projection [num_out, size] (gated: of each half) at 1 to MAX_FEW_ROWS rows."""
    return _TUNED.get((kind, num_out, size, num_rows)) or _by_shape(kind, num_out, size, num_rows)


def _by_shape(kind: Kind, num_out: int, size: int, num_rows: int) -> FewConfig:
    block_k = _next_power_of_2(size)
    if kind == "residual":
        block_k = min(block_k, 2048)
    num_warps = min(max(block_k // 512, 1), 16)
    return FewConfig(2, block_k, num_warps, 4, 1)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


_TUNED: Final[dict[tuple[Kind, int, int, int], FewConfig]] = {}
