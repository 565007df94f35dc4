"""`benchmarks/fp8_decode.py` on a tiny model: what ran, and the bytes that go with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.e2e.models import build_tiny

import fp8_decode


def test_both_formats_in_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of five steps and ten tokens: the first request has decoded before the last one begins."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "src"))
    model, out = build_tiny(tmp_path / "model"), tmp_path / "report.json"
    sizes = ["--batch", "3", "--prompt-len", "10", "--steps", "4", "--max-num-batched-tokens", "8"]
    assert (
        fp8_decode.main([str(model.path), "--out", str(out), "--device", "cpu", "--max-model-len", "64", *sizes]) == 0
    )
    report = json.loads(out.read_text())
    auto, fp8 = report["results"]
    assert (auto["kv_cache_dtype"], fp8["kv_cache_dtype"]) == ("float32", "fp8_e4m3")
    for result in report["results"]:
        assert result["runs_as"] == ["FULL decode:3"]
        assert len(result["round_tpot_ms"]) == 3 and result["sitting"]["id"] == report["sitting"]["id"]
        assert 10 + 6 < result["mean_context"] < 10 + 30
    assert auto["mean_context"] == fp8["mean_context"]
    assert auto["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, size, float32
    assert fp8["bytes_ratio"] == fp8["read_bytes"] / auto["read_bytes"] < 1
    assert "fp8_e4m3" in capsys.readouterr().out
    assert str(tmp_path) not in out.read_text()


def test_a_format_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_tiny(tmp_path / "model")
    words = [str(model.path), "--out", str(tmp_path / "x.json"), "--device", "cpu", "--inside", "int3"]
    assert fp8_decode.main(words) == 1
    assert "fp8_decode: kv_cache_dtype='int3'" in capsys.readouterr().err
