"""Tilings of the products of some rows as tuned on an H200. Written by `benchmarks/tune_small.py --write`.

(kind, outputs, inputs, rows): the fields of `small_configs.SmallConfig`, or None where cuBLAS does better.
"""

from __future__ import annotations

from typing import Final

__all__ = ["TUNED"]

Fields = tuple[int, int, int, int, int, int, bool, int]

TUNED: Final[dict[tuple[str, int, int, int], Fields | None]] = {}
