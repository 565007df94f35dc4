"""`bench reconfigure` on random weights: that it measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato.cli.bench.reconfigure import changes_of
from ostinato.cli.main import main
from ostinato.config import EngineConfig

TINY = ["--load-format", "dummy", "--device", "cpu", "--max-num-seqs", "16", "--max-num-batched-tokens", "32"]


def test_reconfigure(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    words = ["--batch", "3,6", "--running", "4", "--prompt-len", "5", "--steps", "4"]
    assert main(["bench", "reconfigure", model, *TINY, *words, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    out = capsys.readouterr().out
    assert "changes while 4 requests run" in out
    assert report["benchmark"] == "reconfigure"
    assert str(tmp_path) not in file.read_text()

    eager, lazy, background = (report[case] for case in ("eager", "lazy", "background"))
    start = eager["start"]
    assert start["num_pending"] == 0
    assert start["num_recordings"] == len(start["recordings"]) == 5 + 7  # 1 2 4 8 16, and 24 32 for mixed ones
    assert start["capture_s"] == pytest.approx(sum(line["seconds"] for line in start["recordings"]))
    assert start["ready_s"] > sum(start["startup_s"].values()) * 0.99

    sizes, back, mode, again = eager["changes"]
    assert sizes["options"] == {"cudagraph_capture_sizes": [1, 3, 6, 12, 16, 24, 32]}
    recorded = [(line["mode"], line["num_tokens"]) for line in sizes["recorded"]]
    assert recorded == [("PIECEWISE", n) for n in (12, 6, 3)] + [("FULL", n) for n in (12, 6, 3)]
    assert (sizes["kept"], sizes["dropped"]) == (6, 6)
    assert (len(back["recorded"]), back["kept"], back["dropped"]) == (6, 6, 6)
    assert (len(mode["recorded"]), mode["kept"], mode["dropped"]) == (7, 5, 7)
    assert (len(again["recorded"]), again["kept"], again["dropped"]) == (7, 5, 7)
    for change in eager["changes"]:
        assert (change["num_running"], change["preempted"]) == (4, 0)
        assert change["recording_s"] == pytest.approx(sum(line["seconds"] for line in change["recorded"]))
        assert change["recording_s"] < change["seconds"] < change["pause_ms"] / 1e3

    assert lazy["start"]["num_recordings"] == 4
    assert [hit["batch"] for hit in lazy["hits"]] == [3, 6]
    for hit, rows in zip(lazy["hits"], (4, 8), strict=True):
        assert (hit["first_mode"], hit["first_reason"]) == ("NONE", "not recorded")
        assert (hit["later_mode"], hit["later_rows"]) == ("FULL", rows)
        assert ("FULL", rows) in [(line["mode"], line["num_tokens"]) for line in hit["recorded"]]
        assert hit["slowest_ms"] >= hit["first_ms"] > 0
        assert hit["later_ms"]["min"] <= hit["later_ms"]["median"] <= hit["later_ms"]["max"]

    assert background["start"]["num_recordings"] + background["recorded_later"] == background["num_recordings"] == 12
    assert background["num_not_recorded"] == 0
    assert background["all_recorded_s"] > background["start"]["ready_s"]
    assert background["longest_piece_s"] > 0


@pytest.mark.parametrize(
    ("mode", "sizes"), [("FULL", None), ("PIECEWISE", [2, 8, 32]), ("FULL_DECODE_ONLY", None)], ids=str
)
def test_every_change_is_taken_back(mode: str, sizes: list[int] | None) -> None:
    config = EngineConfig(
        model="m", cudagraph_mode=mode, cudagraph_capture_sizes=sizes, max_num_seqs=8, max_num_batched_tokens=32
    )
    there, back, other, again = changes_of(config)
    assert there["cudagraph_capture_sizes"] == [1, 3, 6, 8, 12, 24, 32]
    assert back == {"cudagraph_capture_sizes": sizes}
    assert other == {"cudagraph_mode": "FULL_AND_PIECEWISE"}
    assert again == {"cudagraph_mode": mode}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--capture", "lazy"], "goes through eager, lazy and background"),
        (["--enforce-eager"], "nothing is recorded in mode NONE"),
        (["--batch", "17"], "--max-num-seqs 16 is below 17"),
        (["--running", "0"], "--running 0: must be at least 1"),
        (["--steps", "100"], "need a model length of 912, and it is 256"),
    ],
)
def test_what_cannot_be_measured(
    model: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--batch", "3"] if "--batch" not in words else []
    assert main(["bench", "reconfigure", model, *TINY, *given, *words]) == 2
    assert message in capsys.readouterr().err
