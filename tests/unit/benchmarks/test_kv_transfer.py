"""`benchmarks/kv_transfer.py` on a tiny model: what each case met, and that a wrong state is not measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.models import TinyModel, build_tiny

import kv_transfer

SIZES = ["--prompt-len", "65", "--rounds", "3", "--batch", "2", "--context", "20", "--window", "4"]
SIZES += ["--max-num-batched-tokens", "32", "--max-num-seqs", "4", "--host-gib", "0.01"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return build_tiny(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def run(model: TinyModel, out: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code = kv_transfer.main([str(model.path), "--device", "cpu", "--out", str(out), *SIZES, *more])
    return code, json.loads(out.read_text())


def test_every_case_meets_what_it_is_named_after(
    model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """65 tokens: four blocks can be found, and one token is left, a step of one token."""
    code, report = run(model, tmp_path / "report.json")
    assert code == 0 and "error" not in report
    rows = {row["case"]: row for row in report["ttft"]}
    assert {name: row["tokens_found"] for name, row in rows.items()} == {
        "recompute": 0,
        "load": 64,
        "in the pool": 64,
        "recompute, full pool": 0,
        "load, full pool": 64,
    }
    block_bytes = 2 * 2 * 16 * 2 * 16 * 4  # layers, K and V, tokens, heads, size, float32
    for name in ("load", "load, full pool"):
        assert rows[name]["loaded_bytes"] == 4 * block_bytes
        assert rows[name]["runs_as"] == "FULL decode:1"
        assert rows[name]["same_tokens_as_in_the_pool"] and rows[name]["same_tokens_as_computed"]
    assert rows["load, full pool"]["saved_bytes"] >= 4 * block_bytes
    assert "saved_bytes" not in rows["load"]
    assert rows["recompute"]["runs_as"].count("mixed:32") == 1
    for row in report["tpot"]:
        loads, full = row["case"].startswith("load"), row["case"].endswith("full pool")
        assert len(row["rounds"]) == 3
        for done in row["rounds"]:
            assert (done["loaded_blocks"], done["saved_blocks"] > 0) == (4 if loads else 0, full)
            assert len(done["before_ms"]) == 4 and 1 <= done["overlap_steps"] <= len(done["window_ms"])
    assert "prompt of 65, alone" in capsys.readouterr().out
    assert str(tmp_path) not in json.dumps(report) and str(model.path) not in json.dumps(report)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_the_way_of_the_load(model: TinyModel, tmp_path: Path, load: str) -> None:
    code, report = run(model, tmp_path / "report.json", "--load", load, "--parts", "tpot,ttft")
    assert code == 0 and report["engine"]["load"] == load
    for row in report["tpot"]:
        way = None if row["case"].startswith("recompute") else {"sync": "step", "async": "async"}[load]
        assert row["loaded_by"] == way and all(done["loaded_by"] == way for done in row["rounds"])
        if way:  # a step with a row of one token, whoever loaded
            assert row["runs_as"] == ["FULL decode:4"]
    loaded = next(row for row in report["ttft"] if row["case"] == "load")
    assert loaded["loaded_bytes"] == 4 * 2 * 2 * 16 * 2 * 16 * 4


def test_what_was_not_loaded_is_not_measured(
    model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Host memory for two blocks of the prompt's four."""
    code, report = run(model, tmp_path / "report.json", "--host-gib", str(2 * 8192 / (1 << 30)))
    assert code == 1
    assert [row["case"] for row in report["ttft"]] == ["recompute"] and report["tpot"] == []
    assert "64 and 4 were due (is --host-gib large enough?)" in capsys.readouterr().err


def test_summary() -> None:
    found = kv_transfer.summary([float(number) for number in range(1, 11)])
    assert (found["median_ms"], found["p90_ms"], found["max_ms"], found["count"]) == (5.5, 9.0, 10.0, 10)
