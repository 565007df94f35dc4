"""Ostinato: an LLM inference engine whose GPU work is recorded once and repeated.

The names below are imported on first use, so that `import ostinato` costs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM
    from ostinato.errors import (
        CapacityError,
        CaptureError,
        ConfigError,
        OstinatoError,
        StaleGraphError,
        UnavailableError,
        WeightError,
    )
    from ostinato.request import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "CaptureError",
    "CompletionOutput",
    "ConfigError",
    "OstinatoError",
    "RequestOutput",
    "SamplingParams",
    "StaleGraphError",
    "StructuredOutputsParams",
    "UnavailableError",
    "WeightError",
    "__version__",
]

_HOMES = {"LLM": "ostinato.engine.llm"} | {
    name: "ostinato.request"
    for name in ("CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams")
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ostinato' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "ostinato.errors")), name)
