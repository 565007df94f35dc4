"""`plot.py`: one picture a model, of one sitting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import plot


def write(path: Path, report: dict[str, Any]) -> str:
    path.write_text(json.dumps(report))
    return str(path)


def test_a_picture_for_each_model(report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    other = json.loads(json.dumps(report))
    other["models"][0] |= {"name": "alone", "peer": None}
    words = [write(tmp_path / "a.json", report), write(tmp_path / "b.json", other), "--out", str(tmp_path)]
    assert plot.main(words) == 0
    out = capsys.readouterr().out
    for name in ("tpot-tiny.png", "tpot-alone.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert name in out


def test_lines_of_a_picture(report: dict[str, Any]) -> None:
    lines = plot.series(report["models"][0])
    assert list(lines) == ["Ostinato", "vllm 9.9", "floor"]
    assert lines["Ostinato"][0] == (1, 0.8)
    assert [round(time, 3) for _, time in lines["vllm 9.9"]] == [2.0, 2.4, 3.8]
    for row in report["models"][0]["ostinato"]["decode"]["timings"]:
        row["floor_ms"] = None
    report["models"][0]["peer"] = None
    assert list(plot.series(report["models"][0])) == ["Ostinato"]


def test_mixed_sittings_are_refused(report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = write(tmp_path / "a.json", report)
    assert plot.main([twice, twice, "--out", str(tmp_path)]) == 2
    assert "tiny: in more than one result" in capsys.readouterr().err
    report["models"][0]["peer"]["sitting"]["id"] = "other"
    assert plot.main([write(tmp_path / "b.json", report), "--out", str(tmp_path)]) == 2
    assert "another sitting" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))


def test_a_model_without_timings_is_left_out(report: dict[str, Any]) -> None:
    report["models"][0]["ostinato"]["decode"] = {"error": "exit code 1"}
    assert plot.drawable([report]) == []
