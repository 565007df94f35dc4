"""`benchmarks/length_sweep.py`: its verdict, and all of it on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.models import build_tiny

import length_sweep


def timings(*medians: float) -> list[dict[str, Any]]:
    return [
        {"batch": 1, "context": context, "tpot_ms": {"median": median}}
        for context, median in zip((16, 1000, 4096), medians, strict=True)
    ]


def test_a_length_at_which_the_graph_is_slower_is_named() -> None:
    found = length_sweep.ratios(timings(1.0, 2.1, 4.3), timings(2.0, 2.0, 4.0))
    assert [row["ratio"] for row in found] == [0.5, 1.05, pytest.approx(1.075)]
    (line,) = length_sweep.slower(found)
    assert line.startswith("batch 1, context 4096: the graph takes 1.075")


def test_only_the_same_lengths_are_compared() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        length_sweep.ratios(timings(1.0, 2.0, 3.0), timings(1.0, 2.0, 3.0)[::-1])


@pytest.mark.parametrize(
    ("batch", "context", "expected"),
    [
        (1, 4096, [4096]),
        (2, 16, [15, 16]),
        (4, 1000, [1, 17, 999, 1000]),
        (5, 9, [9, 1, 17, 8, 9]),
        (4, 1, [1, 17, 1, 1]),
    ],
)
def test_prompts_are_ragged_and_end_with_the_longest(batch: int, context: int, expected: list[int]) -> None:
    assert length_sweep.prompt_lens(batch, context) == expected


def test_both_modes_and_the_recordings_in_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "src"))
    monkeypatch.setattr(length_sweep, "LIMIT", float("inf"))  # what the tape takes is not the question here
    model, out = build_tiny(tmp_path / "model"), tmp_path / "report.json"
    sizes = ["--contexts", "5,40", "--steps", "4", "--max-num-batched-tokens", "32", "--recording-lens", "64"]
    assert length_sweep.main([str(model.path), "--out", str(out), "--device", "cpu", "--dtype", "float32", *sizes]) == 0
    report = json.loads(out.read_text())
    graph, eager = report["modes"]
    assert (graph["mode"], eager["mode"]) == ("FULL_AND_PIECEWISE", "NONE")
    assert [timing["runs_as"] for timing in graph["timings"]] == [["FULL decode:1"]] * 2 + [["FULL decode:4"]] * 2
    assert [timing["runs_as"] for timing in eager["timings"]] == [["NONE"]] * 4
    places = [(row["batch"], row["context"]) for row in report["ratios"]]
    assert places == [(1, 5), (1, 40), (4, 5), (4, 40)]
    for result in report["modes"]:
        assert [timing["prompt_lens"] for timing in result["timings"]][-1] == [1, 17, 39, 40]
        assert result["sitting"]["id"] == report["sitting"]["id"]
    (recording,) = report["recording"]
    assert recording["max_model_len"] == recording["runs"][0]["max_model_len"] == 64
    assert recording["seconds"]["min"] > 0 and recording["runs"][0]["num_nodes"] > 0
    assert "max_model_len" in capsys.readouterr().out
    assert str(tmp_path) not in out.read_text()


def test_an_unknown_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_tiny(tmp_path / "model")
    words = [str(model.path), "--out", str(tmp_path / "x.json"), "--device", "cpu", "--inside", "SOME"]
    assert length_sweep.main(words) == 1
    assert "length_sweep: no CUDA graph mode is called 'SOME'" in capsys.readouterr().err
