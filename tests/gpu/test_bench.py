"""What only a GPU can answer: idle time from CUDA events, kernels from the profiler. No times are judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.cli.main import main

from .conftest import ModelFactory

OPTIONS = ["--max-model-len", "256", "--num-gpu-blocks-override", "120", "--cudagraph-capture-sizes", "1,2,4,32"]


def bench(what: str, model: ModelFactory, folder: Path, *options: str) -> dict[str, Any]:
    file = folder / "report.json"
    words = ["bench", what, str(model().path), *OPTIONS, "--batch", "1,3", *options, "--json", str(file)]
    assert main(words) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def test_decode(small_model: ModelFactory, tmp_path: Path) -> None:
    report = bench("decode", small_model, tmp_path, "--prompt-len", "20", "--output-len", "40", "--bandwidth", "4")
    for row in report["timings"]:
        assert row["num_observed_steps"] == 39 - 2 * 2 - 1
        assert 0 < row["idle_share"] < 1
        assert row["idle_us"] > 0
        assert row["host_us"] > 0


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE", "NONE"])
def test_profile(small_model: ModelFactory, tmp_path: Path, mode: str) -> None:
    options = ("--context", "20,70", "--steps", "12", "--cudagraph-mode", mode)
    report = bench("profile", small_model, tmp_path, *options)
    num_layers = report["model"]["num_layers"]
    assert [(row["batch"], row["context"]) for row in report["results"]] == [(1, 20), (1, 70), (3, 20), (3, 70)]
    for row in report["results"]:
        assert row["num_steps"] == 12
        calls = {kind["name"]: kind["calls"] for kind in row["kinds"]}
        assert calls["prepare_kernel"] == calls["advance_kernel"] == 1
        assert sum(step["raw_us"] for step in row["sequence"]) > 0
        assert row["layers"] is not None
        assert len(row["layers"]["layers_us"]) == num_layers - 1
