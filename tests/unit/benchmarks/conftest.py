"""A comparison as `compare.py` writes it, and a package that stands in for vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SITTING = {"id": "a" * 32, "gpus": ["NVIDIA H200"], "gpu_hash": "0123", "driver": "580.1", "boot_hash": "4567"}
SITTING |= {"time": "2026-01-01T00:00:00Z"}

VLLM = """
import time

__version__ = "9.9"


class SamplingParams:
    def __init__(self, **options):
        self.max_tokens = options["max_tokens"]
        assert options["ignore_eos"] and not options["detokenize"]


class LLM:
    def __init__(self, model, **options):
        assert options["load_format"] == "dummy" and not options["enable_prefix_caching"]

    def generate(self, prompts, params, use_tqdm):
        each = params if isinstance(params, list) else [params] * len(prompts)
        assert len(each) == len(prompts) and not use_tqdm
        if FAILS_ABOVE and len(prompts) > FAILS_ABOVE:
            raise RuntimeError("no memory for /data/somewhere/weights.bin")
        time.sleep(2e-4 * max(one.max_tokens for one in each))
"""


def decode_rows(tpot_ms: float) -> list[dict[str, Any]]:
    return [
        {
            "batch": batch,
            "tpot_min_ms": tpot_ms * scale,
            "tpot_median_ms": tpot_ms * scale * 1.01,
            "spread_ms": 0.01,
            "ttft_ms": 5.0,
            "floor_ms": 0.5 * scale,
            "floor_share": 0.5 / tpot_ms,
            "idle_share": 0.02,
        }
        for batch, scale in ((1, 1.0), (8, 1.2), (64, 1.9))
    ]


@pytest.fixture
def report() -> dict[str, Any]:
    """Times at batch 1: 0.8 ms here, 2 ms there."""
    decode = {
        "timings": decode_rows(0.8),
        "workload": {"prompt_len": 128, "output_len": 129},
        "model": {"dtype": "bfloat16"},
        "environment": {"device": "cuda"},
    }
    ours = {
        "decode": decode,
        "prefill": {"timings": [{"prompt_len": 2048, "ttft_ms": {"min": 10.0}}]},
        "startup": {"first_token_s": {"median": 6.0}},
        "throughput": {
            "workload": {"prompt_tokens": 10, "output_tokens": 20},
            "output_tokens_per_s": {"median": 30000.0},
        },
        "sitting": SITTING,
    }
    peer = {
        "peer": "vllm 9.9",
        "first_token_s": 42.0,
        "timings": decode_rows(2.0),
        "prefill": {"prompt_len": 2048, "ttft_ms": {"min": 12.0}},
        "throughput": {"prompt_tokens": 10, "output_tokens": 20, "output_tokens_per_s": {"median": 24000.0}},
        "sitting": SITTING,
    }
    whole = {
        "benchmark": "compare",
        "sitting": SITTING,
        "bandwidth": {"read_tb_s": 4.6},
        "models": [{"name": "tiny", "ostinato": ours, "peer": peer}],
    }
    copy: dict[str, Any] = json.loads(json.dumps(whole))  # nothing in it twice
    return copy


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A folder to import it from."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "vllm.py").write_text(f"FAILS_ABOVE = 0\n{VLLM}")
    return folder
