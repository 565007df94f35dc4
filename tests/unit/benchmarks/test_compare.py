"""`compare.py`: halves of one sitting only, saved one by one, errors kept; the peer's script against a stand-in."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import compare
from ostinato.cli.bench.throughput import draw_lengths
from process import run_process
from sitting import MixedSittingsError, load, new_id, require_one_sitting, stamp, without_paths

Report = dict[str, Any]


def entry(report: Report) -> Any:
    return report["models"][0]


# -- sittings ----------------------------------------------------------------------------------------------------------


def test_one_sitting(report: Report) -> None:
    require_one_sitting(report)
    entry(report)["peer"]["sitting"]["time"] = "2026-01-01T00:09:00Z"
    require_one_sitting(report)
    entry(report)["peer"] = None
    require_one_sitting(report)


@pytest.mark.parametrize(
    ("half", "field", "value"),
    [
        ("peer", "id", "b" * 32),
        ("ostinato", "id", "b" * 32),
        ("peer", "gpu_hash", "9999"),
        ("peer", "driver", "570.1"),
        ("peer", "boot_hash", None),
    ],
)
def test_halves_of_different_sittings_are_refused(report: Report, half: str, field: str, value: str | None) -> None:
    entry(report)[half]["sitting"] = entry(report)[half]["sitting"] | {field: value}
    with pytest.raises(MixedSittingsError, match=f"tiny: the half of {half} comes from another sitting \\({field} "):
        require_one_sitting(report)


def test_a_half_without_a_stamp_is_refused(report: Report) -> None:
    del entry(report)["peer"]["sitting"]
    with pytest.raises(MixedSittingsError, match="half of peer"):
        require_one_sitting(report)


def test_different_requests_are_refused(report: Report) -> None:
    entry(report)["peer"]["throughput"]["output_tokens"] = 21
    with pytest.raises(MixedSittingsError, match="differ in output_tokens \\(20 and 21\\)"):
        require_one_sitting(report)


def test_a_stamp_names_no_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sitting

    boot = tmp_path / "boot_id"
    boot.write_text("11111111-2222\n")
    monkeypatch.setattr(sitting, "_BOOT_FILE", boot)
    monkeypatch.setattr(sitting, "_nvidia_smi", lambda: [("NVIDIA H200", "GPU-abc", "580.1")])
    made = stamp(new_id())
    assert (made["gpus"], made["driver"]) == (["NVIDIA H200"], "580.1")
    assert "GPU-abc" not in json.dumps(made)
    assert "11111111" not in json.dumps(made)
    assert stamp(made["id"])["boot_hash"] == made["boot_hash"]
    boot.write_text("33333333-2222\n")
    assert stamp(made["id"])["boot_hash"] != made["boot_hash"]
    monkeypatch.setattr(sitting, "_nvidia_smi", list)
    assert stamp("x")["gpu_hash"] is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no /data/models/llama-1b/config.json here", "no config.json here"),
        ('File "/usr/lib/python3/x.py", line 3', 'File "x.py", line 3'),
        ("~/a/b.txt and a/b/c.txt", "b.txt and a/b/c.txt"),
        ("https://host.example/a/b stays, 3/4 too", "https://host.example/a/b stays, 3/4 too"),
    ],
)
def test_paths_are_cut(text: str, shown: str) -> None:
    assert without_paths(text) == shown


# -- printing again ----------------------------------------------------------------------------------------------------


def test_from_prints_ratios(report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(report))
    assert compare.main(["--from", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in lines if line.strip().startswith("64 "))
    assert row == ["64", "1.520", "1.535", "0.010", "3.800", "3.838", "0.010", "2.50", "0.950", "62%", "2.0%"]
    assert next(line for line in lines if "TTFT of 2048" in line).split()[-3:] == ["10.000", "12.000", "1.20"]
    assert next(line for line in lines if "throughput" in line).split()[-3:] == ["30,000", "24,000", "1.25"]
    assert next(line for line in lines if "first token" in line).split()[-3:] == ["6.000", "42.000", "7.00"]


def test_from_refuses_mixed_sittings(report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry(report)["peer"]["sitting"]["id"] = "b" * 32
    file = tmp_path / "r.json"
    file.write_text(json.dumps(report))
    assert compare.main(["--from", str(file)]) == 2
    captured = capsys.readouterr()
    assert "another sitting" in captured.err
    assert captured.out == ""
    file.write_text("[]")
    with pytest.raises(MixedSittingsError, match=r"r\.json is not a result"):
        load(file)


# -- running -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Report]]:
    """`run(peer_path, *options)`: our own half is made up, the peer's is run."""

    def half(args: Any, model: Path, part: str, options: list[str]) -> Report:
        return {"timings": [], "options": options}

    def go(peer_path: Path, *options: str, bench: Callable[..., Report] = half) -> tuple[int, Report]:
        monkeypatch.setattr(compare, "_bench", bench)
        file = tmp_path / "out.json"
        words = [str(shape), "--bandwidth", "4.5", "--batch", "1,2", "--out", str(file), "--peer-path", str(peer_path)]
        return compare.main([*words, *options]), json.loads(file.read_text())

    return go


def test_both_halves(run: Callable[..., tuple[int, Report]], vllm: Path) -> None:
    code, report = run(vllm, "--throughput", "--prompt-len", "4", "--output-len", "5", "--prefill-len", "9")
    assert code == 0
    assert report["sitting"]["id"] == entry(report)["ostinato"]["sitting"]["id"]
    assert set(entry(report)["ostinato"]) == {"decode", "prefill", "startup", "throughput", "sitting"}
    assert entry(report)["ostinato"]["prefill"]["options"][:2] == ["--prompt-len", "9"]
    peer = entry(report)["peer"]
    assert peer["peer"] == "vllm 9.9"
    assert [row["batch"] for row in peer["timings"]] == [1, 2]
    assert all(row["tpot_min_ms"] >= 0.1 for row in peer["timings"])
    assert peer["prefill"]["prompt_len"] == 9
    assert peer["first_token_s"] > peer["import_s"] + peer["ready_s"]
    lengths = draw_lengths(256, 100, 1024, 0)
    sums = (sum(num_in for num_in, _ in lengths), sum(num_out for _, num_out in lengths))
    assert (peer["throughput"]["prompt_tokens"], peer["throughput"]["output_tokens"]) == sums


def test_a_peer_that_fails_keeps_what_it_had(run: Callable[..., tuple[int, Report]], vllm: Path) -> None:
    module = vllm / "vllm.py"
    module.write_text(module.read_text().replace("FAILS_ABOVE = 0", "FAILS_ABOVE = 1"))
    code, report = run(vllm, "--prompt-len", "4", "--output-len", "5")
    assert code == 1
    assert set(entry(report)["ostinato"]) == {"decode", "prefill", "startup", "sitting"}
    peer = entry(report)["peer"]
    assert [row["batch"] for row in peer["timings"]] == [1]
    assert peer["error"].splitlines()[-1] == "RuntimeError: no memory for weights.bin"
    assert str(vllm) not in json.dumps(report)


def test_a_peer_that_is_not_there(
    run: Callable[..., tuple[int, Report]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('no vllm here')")
    code, report = run(tmp_path, "--startup-runs", "0")
    assert code == 1
    assert set(entry(report)["ostinato"]) == {"decode", "prefill", "sitting"}
    assert "vllm failed (run): ImportError: no vllm here" in capsys.readouterr().out
    code, report = run(tmp_path, "--peer", "none")
    assert (code, entry(report)["peer"]) == (0, None)


def test_our_own_failure_is_kept_too(run: Callable[..., tuple[int, Report]], vllm: Path) -> None:
    def fails(args: Any, model: Path, part: str, options: list[str]) -> Report:
        return {"error": "exit code 2\nno room"} if part == "prefill" else {"timings": []}

    code, report = run(vllm, "--prompt-len", "4", "--output-len", "5", bench=fails)
    assert code == 1
    assert entry(report)["ostinato"]["prefill"]["error"].endswith("no room")
    assert "timings" in entry(report)["ostinato"]["decode"]
    assert "timings" in entry(report)["peer"]


def test_our_half_is_saved_before_the_peer_runs(
    run: Callable[..., tuple[int, Report]], vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "run_process", cut)
    with pytest.raises(KeyboardInterrupt):
        run(vllm)
    saved = load(tmp_path / "out.json")
    assert "decode" in entry(saved)["ostinato"]
    assert entry(saved)["peer"] is None


def test_a_measurement_that_fails_is_an_error_without_paths(shape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real command line, refused before it loads anything."""
    args = compare._parse([str(shape)])
    half = compare._bench(args, shape, "decode", ["--runs", "1"])
    assert half["error"].splitlines()[0] == "exit code 2"
    assert half["error"].splitlines()[-1] == "ostinato: error: --runs 1: must be at least 3"
    assert str(shape.parent) not in compare._bench(args, shape, "decode", ["--json", "/no/such/x.json"])["error"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a model folder"),
        (["no-such-folder"], "has no config.json"),
        (["--from", "x.json", "MODEL"], "it takes no models"),
        (["MODEL", "MODEL"], "two models have the same name"),
        (["MODEL", "--out", "no/such/x.json"], "there is no such folder"),
    ],
)
def test_usage_errors(words: list[str], message: str, shape: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main([str(shape) if word == "MODEL" else word for word in words])
    assert message in capsys.readouterr().err


# -- processes ---------------------------------------------------------------------------------------------------------


def test_processes() -> None:
    python = [sys.executable, "-c"]
    done = run_process([*python, "import sys; print('out'); print('err', file=sys.stderr)"], timeout_s=60)
    assert (sorted(done.lines), done.error) == (["err", "out"], "")
    assert run_process([*python, "raise SystemExit('bad')"], timeout_s=60).error == "exit code 1\nbad"
    assert run_process([*python, "import time; time.sleep(60)"], timeout_s=0.2).error.startswith("ended after 0.2 s")
    assert "cannot be started" in run_process(["no-such-program"], timeout_s=60).error
