"""`benchmarks/memory.py`: sums, verdict and table. Made-up numbers stand for what only a CUDA device says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memory
from cases import CaseError
from ostinato.engine.stats import MemoryStat, RecordingStat

MIB = 1 << 20
TABLE = MemoryStat(
    before=500 * MIB,
    weights=2000 * MIB,
    kv=60000 * MIB,
    graphs=300 * MIB,
    buffers=400 * MIB,
    libraries=100 * MIB,
    activations=120 * MIB,
    free=16700 * MIB - 5,
    total=80000 * MIB,
)


def recording(mode: str, num_tokens: int, num_bytes: int) -> RecordingStat:
    return RecordingStat(mode, num_tokens, num_tokens, 1, 1, 100, 0.1, num_bytes)


def result(unaccounted: int = 5, served: int = 5) -> dict[str, Any]:
    """What a case's process hands over."""
    start, later = (
        memory.add_up(replace(TABLE, free=16700 * MIB - difference)) | {"torch_cache": MIB}
        for difference in (unaccounted, served)
    )
    return {
        "environment": {"device": "cuda", "device_name": "NVIDIA H200"},
        "kv_tokens": 1_234_560,
        "start_s": 7.5,
        "largest_recording": memory.largest((recording("FULL", 256, 3 * MIB),)),
        "start": start,
        "served": later,
        "closed": {"used_before": 500 * MIB, "used": 620 * MIB, "retained": 120 * MIB},
    }


def test_the_sum_leaves_out_what_comes_and_goes() -> None:
    found = memory.add_up(TABLE)
    assert found["sum"] == 63300 * MIB == sum(found["parts"].values())
    assert found["used"] == 63300 * MIB + 5
    assert found["unaccounted"] == TABLE.unaccounted == 5
    assert found["activations"] == 120 * MIB
    assert found["used_share"] == pytest.approx(63300 / 80000)


@pytest.mark.parametrize("missing", ["total", "free", "before"])
def test_nothing_to_add_up_to(missing: str) -> None:
    with pytest.raises(memory.NoTableError, match="does not say what is in use"):
        memory.add_up(replace(TABLE, **{missing: None}))


def test_the_largest_recording_is_so_by_bytes() -> None:
    lines = (recording("FULL", 1, 7 * MIB), recording("FULL", 256, 2 * MIB))
    assert memory.largest(lines) == {"mode": "FULL", "num_tokens": 1, "query_len": 1, "bytes": 7 * MIB}
    assert memory.largest(()) is None


@pytest.mark.parametrize("moment", ["start", "served"])
@pytest.mark.parametrize(("difference", "fails"), [(64, False), (-64, False), (65, True), (-65, True)])
def test_more_than_64_mib_either_way_is_a_fault(moment: str, difference: int, fails: bool) -> None:
    sizes = {"unaccounted" if moment == "start" else "served": difference * MIB}
    case = {"shape": "llama-1b", "gpu_memory_utilization": 0.9, **result(**sizes)}
    found = memory.faults([case])
    assert len(found) == fails
    if fails:
        assert found[0].startswith(f"llama-1b at 0.9, {moment}: ") and f"{difference:+.1f} MiB" in found[0]


def fake_device(monkeypatch: pytest.MonkeyPatch, results: dict[str, dict[str, Any] | None]) -> None:
    """Cases give these, by `index@share`; None: the process fails."""

    def run_case(script: Path, words: Sequence[str], case: str) -> dict[str, Any]:
        found = results[case]
        if found is None:
            raise CaseError(f"{case} ended with exit code 1")
        return found

    monkeypatch.setattr(memory, "run_case", run_case)
    monkeypatch.setattr(memory, "require_cuda", lambda name: torch.device("cuda"))


def test_all_cases_in_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_device(monkeypatch, {"0@0.5": result(), "0@0.9": result(), "1@0.5": result(), "1@0.9": result()})
    out = tmp_path / "report.json"
    words = [str(tmp_path / "llama-1b"), str(tmp_path / "llama-8b"), "--utilization", "0.5,0.9", "--out", str(out)]
    assert memory.main(words) == 0
    text = out.read_text()
    report = json.loads(text)
    cases = [(row["shape"], row["gpu_memory_utilization"]) for row in report["results"]]
    assert cases == [("llama-1b", 0.5), ("llama-1b", 0.9), ("llama-8b", 0.5), ("llama-8b", 0.9)]
    assert {row["sitting"]["id"] for row in report["results"]} == {report["sitting"]["id"]}
    assert str(tmp_path) not in text
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert "NVIDIA H200 of 80,000" in head and len(rows) == 4
    assert columns.split()[2:8] == list(memory.PARTS)
    assert rows[0].split()[:10] == [
        "llama-1b",
        "0.5",
        "500",
        "2,000",
        "60,000",
        "300",
        "400",
        "100",
        "63,300",
        "63,300",
    ]
    assert rows[0].split()[-4:] == ["1,234,560", "7.50", "3.0", "120.0"]


def test_a_case_that_fails_is_kept_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_device(monkeypatch, {"0@0.5": None, "0@0.9": result(served=-70 * MIB)})
    out = tmp_path / "report.json"
    assert memory.main([str(tmp_path / "llama-1b"), "--utilization", "0.5,0.9", "--out", str(out)]) == 1
    assert [("error" in row) for row in json.loads(out.read_text())["results"]] == [True, False]
    first, second = capsys.readouterr().err.splitlines()
    assert first == "memory: llama-1b at 0.5: 0@0.5 ended with exit code 1"
    assert second.startswith("memory: llama-1b at 0.9, served: ")


def test_the_cpu_has_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.json"
    assert memory.main([str(tmp_path), "--out", str(out), "--device", "cpu"]) == 1
    assert "there is nothing to add up on cpu" in capsys.readouterr().err
    assert not out.exists()


def test_no_cuda_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert memory.main([str(tmp_path), "--out", str(tmp_path / "x.json")]) == 1
    assert "there is no CUDA device here" in capsys.readouterr().err
