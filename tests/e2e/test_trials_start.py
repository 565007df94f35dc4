"""The trial card of the start: what is logged of it adds up to the time it took."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ostinato import LLM

from .conftest import TinyFactory


@pytest.mark.parametrize(
    "options",
    [
        {"cudagraph_mode": "NONE"},
        {"capture": "lazy"},
        {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32], "cudagraph_mode": "FULL_AND_PIECEWISE"},
        {"max_num_seqs": 256, "max_num_batched_tokens": 256, "cudagraph_mode": "FULL_DECODE_ONLY"},
    ],
    ids=["none", "lazy", "12 keys", "35 keys"],
)
def test_startup_parts_add_up(tiny_model: TinyFactory, options: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 32, "max_num_batched_tokens": 32}
    path = str(tiny_model("Llama").path)
    began = time.perf_counter()
    llm = LLM(path, **settings | options)
    wall = time.perf_counter() - began
    with llm:
        stats = llm.stats()
        assert {"config", "weights", "buffers", "warm-up", "recording", "kv"} <= stats.startup_s.keys()
        assert wall * 0.95 - 0.02 < sum(stats.startup_s.values()) <= wall
        expected = {"FULL_DECODE_ONLY": 35, "NONE": 0}.get(stats.resolved_mode)
        assert expected is None or stats.num_recordings == expected
