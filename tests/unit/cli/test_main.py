"""Exit codes and what an error looks like."""

from __future__ import annotations

import pytest

import ostinato
from ostinato.cli import bench, generate
from ostinato.cli.main import COMMANDS, main
from ostinato.cli.report import describe_key, format_bytes
from ostinato.graphs.dispatch import BatchKey


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ostinato {ostinato.__version__}\n"
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"usage: ostinato {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generat"], "unknown command generat: did you mean generate?"),
        (["zzz"], "unknown command zzz: see ostinato --help"),
        (["--verson"], "unknown option --verson: did you mean --version?"),
        (["generate", "no/such", "p"], "no such file or folder"),
        (["generate", "M", "p", "--temperature", "-1"], "SamplingParams.temperature=-1.0"),
        (["generate", "M", "p", "--system", "s"], "--system belongs to --chat"),
        (["plan", "M", "--cudagraph-mode", "PEACEWISE"], "did you mean PIECEWISE?"),
        (["plan", "M", "--memory", "much"], "'much' is not a size"),
        (["plan", "M", "--memory", "1GiB", "--device", "cpu"], "leave out --device cpu"),
        (["plan", "M", "--cudagraph-capture-sizes", "auto"], "needs steps that were counted"),
        (["tune"], "SOURCE"),
        (["tune", "no/such"], "no/such: No such file or directory; give a file, or the URL of a server"),
        (["tune", "http://127.0.0.1:1"], "http://127.0.0.1:1/metrics cannot be reached"),
        (["tune", "f", "--max-sizes", "0"], "--max-sizes 0: must be at least 1"),
        (["tune", "f", "--max-sizes", "3", "--max-bytes", "1GiB"], "not allowed with"),
        (["tune", "f", "--graph-bytes", "1MiB"], "give that too"),
        (["tune", "f", "--cudagraph-mode", "FUL"], "did you mean FULL?"),
        (["chat", "M", "--n", "2"], "one answer at a time"),
        (["serve", "M", "--port", "65536"], "--port 65536: must be between 0 and 65535"),
        (["serve", "M", "--max-queue", "-1"], "--max-queue -1: must be at least 0"),
        (["serve", "M", "--max-body", "much"], "'much' is not a size"),
        (["serve", "M", "--max-num-seqs", "0"], "max_num_seqs=0"),
        (["bench", "mode", "M"], "unknown command mode: did you mean modes?"),
        (["bench", "decode", "M", "--runs", "2"], "--runs 2: must be at least 3"),
        (["bench", "decode", "M", "--batch", "4,0"], "--batch 4,0: must be at least 1"),
        (["bench", "decode", "M", "--output-len", "1"], "--output-len 1: must be at least 2"),
        (["bench", "decode", "M", "--batch", "8", "--max-num-seqs", "4"], "--max-num-seqs 4 is below --batch 8"),
        (["bench", "decode", "M", "--bandwidth", "fast"], "'fast' is neither auto nor a number of TB/s above 0"),
        (["bench", "decode", "M", "--bandwidth", "0"], "'0' is neither auto nor a number of TB/s above 0"),
        (["bench", "decode", "M", "--enable-prefix-caching"], "would spoil"),
        (["bench", "prefill", "M", "--prompt-len", "0"], "--prompt-len 0: must be at least 1"),
        (["bench", "throughput", "M", "--min-len", "9", "--max-len", "8"], "--max-len 8 is below --min-len 9"),
        (["bench", "throughput", "M", "--runs", "0"], "--runs 0: must be at least 1"),
        (["bench", "startup", "M", "--json", "/no/such/folder/x.json"], "there is no folder"),
        (["bench", "profile", "M", "--steps", "0"], "--steps 0: must be at least 1"),
        (["bench", "profile", "M", "--runs", "3"], "unknown option --runs"),
        (["bench", "modes", "M", "--modes", "FULL,PEACEWISE"], "did you mean PIECEWISE?"),
        (["bench", "modes", "M", "--modes", ","], "--modes names none"),
        (["bench", "modes", "M", "--runs", "2"], "--runs 2: must be at least 3"),
        (["bench", "modes", "M", "--enforce-eager"], "goes through the modes in --modes"),
        (["bench", "modes", "M", "--enable-prefix-caching"], "would spoil"),
        (["bench", "modes", "M", "--json", "/no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_errors_are_one_line_and_exit_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ostinato: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("name", bench.COMMANDS)
def test_each_measurement_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--help"]) == 0
    subject = "URL" if name == "serve" else "MODEL"
    assert f"usage: ostinato bench {name} [OPTIONS] {subject}" in capsys.readouterr().out


def test_bench_lists_its_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in bench.COMMANDS)
    assert main(["bench"]) == 2


def test_nothing_typed_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands" in capsys.readouterr().out


def test_ctrl_c_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "run", interrupted)
    assert main(["generate", "M", "p"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1.00 KiB"),
        (5 * 2**20, "5.00 MiB"),
        (72 * 2**30, "72.00 GiB"),
        (2**40, "1.00 TiB"),
    ],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_describe_key() -> None:
    assert describe_key(None) == "-"
    assert describe_key(BatchKey(64, 8, None)) == "64 tokens"
    assert describe_key(BatchKey(1, 1, 1)) == "1 row"
    assert describe_key(BatchKey(12, 4, 3)) == "4 rows x 3"
