"""Tilings of the few-row projections as tuned on an H200. Written by `benchmarks/tune_few.py --write`.

(kind, outputs, inputs, rows): the fields of `few_configs.FewConfig`.
"""

from __future__ import annotations

from typing import Final

TUNED: Final[dict[tuple[str, int, int, int], tuple[int, int, int, int, int, bool, int | None]]] = {
    ("norm", 3072, 2048, 1): (4, 2048, 4, 2, 0, False, 96),
    ("residual", 2048, 2048, 1): (4, 2048, 4, 6, 0, False, None),
    ("gated", 8192, 2048, 1): (1, 2048, 2, 16, 0, False, None),
    ("residual", 2048, 8192, 1): (2, 4096, 8, 4, 0, False, None),
    ("norm", 128256, 2048, 1): (4, 2048, 4, 8, 1, False, 96),
    ("norm", 3072, 2048, 2): (1, 2048, 2, 8, 0, False, None),
    ("residual", 2048, 2048, 2): (4, 1024, 4, 4, 1, False, None),
    ("gated", 8192, 2048, 2): (2, 2048, 4, 4, 0, False, None),
    ("residual", 2048, 8192, 2): (2, 8192, 8, 2, 0, False, None),
    ("norm", 128256, 2048, 2): (4, 2048, 4, 8, 1, False, None),
    ("norm", 3072, 2048, 4): (2, 2048, 4, 4, 0, False, None),
    ("residual", 2048, 2048, 4): (8, 1024, 8, 3, 1, True, None),
    ("gated", 8192, 2048, 4): (8, 256, 4, 4, 0, True, None),
    ("residual", 2048, 8192, 4): (8, 1024, 8, 2, 0, True, None),
    ("norm", 128256, 2048, 4): (16, 256, 4, 4, 0, True, None),
    ("norm", 4096, 1024, 1): (2, 1024, 1, 8, 0, False, None),
    ("residual", 1024, 2048, 1): (4, 2048, 4, 8, 0, False, None),
    ("gated", 3072, 1024, 1): (2, 1024, 4, 8, 0, False, 64),
    ("residual", 1024, 3072, 1): (2, 2048, 8, 4, 0, False, 96),
    ("norm", 151936, 1024, 1): (4, 1024, 4, 8, 1, False, None),
    ("norm", 4096, 1024, 2): (2, 1024, 1, 8, 0, False, None),
    ("residual", 1024, 2048, 2): (4, 1024, 4, 8, 1, False, None),
    ("gated", 3072, 1024, 2): (1, 1024, 1, 8, 1, False, None),
    ("residual", 1024, 3072, 2): (4, 2048, 8, 4, 0, False, None),
    ("norm", 151936, 1024, 2): (4, 1024, 2, 16, 1, False, None),
    ("norm", 4096, 1024, 4): (2, 1024, 2, 8, 0, False, None),
    ("residual", 1024, 2048, 4): (2, 1024, 4, 8, 0, False, None),
    ("gated", 3072, 1024, 4): (1, 1024, 2, 8, 0, False, None),
    ("residual", 1024, 3072, 4): (2, 1024, 4, 4, 0, False, None),
    ("norm", 151936, 1024, 4): (32, 256, 4, 4, 0, True, None),
    ("norm", 6144, 4096, 1): (2, 4096, 8, 4, 0, False, 80),
    ("residual", 4096, 4096, 1): (8, 2048, 8, 2, 0, False, None),
    ("gated", 14336, 4096, 1): (1, 4096, 4, 8, 0, False, None),
    ("residual", 4096, 14336, 1): (4, 8192, 16, 1, 1, False, None),
    ("norm", 128256, 4096, 1): (2, 4096, 8, 4, 0, False, 64),
    ("norm", 6144, 4096, 2): (4, 4096, 8, 2, 1, False, None),
    ("residual", 4096, 4096, 2): (4, 4096, 8, 2, 0, False, None),
    ("gated", 14336, 4096, 2): (2, 4096, 8, 4, 0, False, None),
    ("residual", 4096, 14336, 2): (4, 2048, 8, 1, 0, False, None),
    ("norm", 128256, 4096, 2): (4, 4096, 8, 4, 1, False, None),
    ("norm", 6144, 4096, 4): (2, 4096, 8, 2, 1, False, None),
    ("residual", 4096, 4096, 4): (16, 512, 8, 2, 0, True, None),
    ("gated", 14336, 4096, 4): (8, 512, 4, 2, 0, True, None),
    ("residual", 4096, 14336, 4): (8, 1024, 8, 2, 0, True, None),
    ("norm", 128256, 4096, 4): (32, 256, 4, 4, 0, True, None),
}
