"""`benchmarks/sanitize.py`: reading what the tools say, and its conduct, with a script in the place of the tool."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import sanitize

CLEAN = """\
========= COMPUTE-SANITIZER
SANITIZE MODE NONE
SANITIZE MODE FULL
SANITIZE MODE DONE
========= ERROR SUMMARY: 0 errors
"""

MEMCHECK = """\
========= COMPUTE-SANITIZER
SANITIZE MODE NONE
some line of the program
SANITIZE MODE FULL
========= Invalid __global__ read of size 2 bytes
=========     at advance_kernel+0x1d0 in /src/triton_step.py:120
=========     by thread (3,0,0) in block (1,0,0)
=========     Access at 0x7f0000000010 is out of bounds
=========     and is 17 bytes after the nearest allocation at 0x7f0000000000 of size 512 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuGraphLaunch [0x2ef]
=========
========= Invalid __global__ read of size 2 bytes
=========     at advance_kernel+0x1d0 in /src/triton_step.py:120
=========     by thread (4,0,0) in block (2,0,0)
=========     Access at 0x7f0000000012 is out of bounds
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call to cudaEventSynchronize.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: libcuda.so.1 [0x1]
=========
========= ERROR SUMMARY: 3 errors
"""  # noqa: E501

PROBE = (
    '========= Program hit {error} due to "{text}" on CUDA API call to {call}.\n'
    "=========     Saved host backtrace up to driver entry point at error\n"
    "=========         Host Frame: libcuda.so.1 [0x1]\n=========\n"
)
INVALID = PROBE.format(error="CUDA_ERROR_INVALID_VALUE (error 1)", text="invalid argument", call="cuGetProcAddress_v2")
NOT_FOUND = PROBE.format(
    error="CUDA_ERROR_NOT_FOUND (error 500)", text="named symbol not found", call="cuGetProcAddress"
)
HANDED_ON = PROBE.format(
    error="CUDA_ERROR_ILLEGAL_ADDRESS (error 700)",
    text="an illegal memory access was encountered",
    call="cuGetProcAddress_v2",
)
OTHER_CALL = PROBE.format(error="CUDA_ERROR_INVALID_VALUE (error 1)", text="invalid argument", call="cuMemcpyAsync")

INITCHECK = """\
========= COMPUTE-SANITIZER
SANITIZE MODE PIECEWISE
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<int>>(int)+0x40
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f1200000200
=========
SANITIZE MODE DONE
========= ERROR SUMMARY: 1 error
"""

RACECHECK = """\
========= COMPUTE-SANITIZER
SANITIZE MODE FULL
========= Error: Race reported between Write access at decode_kernel+0x880 and Read access at decode_kernel+0x900 [64 hazards]
=========
========= Warning: Race reported between Write access at decode_kernel+0x10 and Read access at decode_kernel+0x20 [2 hazards]
=========
SANITIZE MODE DONE
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""  # noqa: E501


def test_a_clean_run() -> None:
    assert sanitize.parse(CLEAN) == {"errors": 0, "warnings": 0, "finished": True, "findings": [], "ignored": []}


def test_memcheck() -> None:
    found = sanitize.parse(MEMCHECK)
    assert (found["errors"], found["finished"]) == (3, False)
    read, hit = found["findings"]
    assert read == {
        "message": "Invalid __global__ read of size 2 bytes",
        "kernel": "advance_kernel",
        "mode": "FULL",
        "count": 2,
    }
    assert hit["message"].startswith("Program hit cudaErrorLaunchFailure (error 719)")
    assert (hit["kernel"], hit["count"]) == (None, 1)


def probing(*reports: str) -> dict[str, Any]:
    """What is parsed of a run that came to its end with these reports."""
    text = f"========= COMPUTE-SANITIZER\n{''.join(reports)}SANITIZE MODE FULL\nSANITIZE MODE DONE\n"
    return sanitize.parse(f"{text}========= ERROR SUMMARY: {len(reports)} errors\n")


def test_entry_points_that_the_driver_lacks_are_no_findings() -> None:
    found = probing(*[INVALID] * 34, NOT_FOUND)
    assert found["findings"] == [] and found["errors"] == 35
    assert [(report["count"], report["message"].split(" due")[0]) for report in found["ignored"]] == [
        (34, "Program hit CUDA_ERROR_INVALID_VALUE (error 1)"),
        (1, "Program hit CUDA_ERROR_NOT_FOUND (error 500)"),
    ]
    assert sanitize.verdict(found | RAN) == "clean"


@pytest.mark.parametrize("report", [HANDED_ON, OTHER_CALL])
def test_every_other_failed_call_is_a_finding(report: str) -> None:
    found = probing(INVALID, report, INVALID)
    assert [(finding["count"], sanitize.num_ignored(found)) for finding in found["findings"]] == [(1, 2)]
    assert found["findings"][0]["message"] == report.splitlines()[0].removeprefix("========= ")
    assert sanitize.verdict(found | RAN) == "findings"


def test_errors_that_were_counted_and_not_shown_are_findings() -> None:
    found = probing(INVALID) | {"errors": 2}
    assert found["findings"] == [] and sanitize.verdict(found | RAN) == "findings"


def test_initcheck() -> None:
    found = sanitize.parse(INITCHECK)
    assert (found["errors"], found["finished"]) == (1, True)
    (read,) = found["findings"]
    assert read["kernel"].startswith("void at::native::vectorized_elementwise_kernel<(int)4")
    assert read["kernel"].endswith("(int)")
    assert read["mode"] == "PIECEWISE"


def test_racecheck() -> None:
    found = sanitize.parse(RACECHECK)
    assert (found["errors"], found["warnings"]) == (1, 1)
    error, warning = found["findings"]
    assert error["message"].startswith("Error: Race reported between Write access at decode_kernel+0x...")
    assert warning["message"].startswith("Warning: Race")


RAN = {"timed_out": False, "exit_code": 0}
"""Beside what is parsed, of a tool that ended by itself."""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "clean"),
        ({"errors": 2}, "findings"),
        ({"findings": [{"count": 1}], "errors": None}, "findings"),
        ({"warnings": 1}, "findings"),
        ({"errors": None}, "failed"),
        ({"finished": False}, "failed"),
        ({"exit_code": 1}, "failed"),
        ({"timed_out": True, "errors": None}, "timed out"),
    ],
)
def test_verdict(change: dict[str, object], expected: str) -> None:
    good = {"errors": 0, "warnings": 0, "finished": True, "findings": [], "ignored": []}
    assert sanitize.verdict(good | RAN | change) == expected


def fake_tool(folder: Path, body: str) -> Path:
    """A script that takes the tool's options and runs the program, as the tool does."""
    script = folder / "compute-sanitizer"
    script.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\n"
        "if sys.argv[1] == '--version':\n    print('Version 2025.1.0.0 (build 1)')\n    sys.exit()\n"
        "tool, words = sys.argv[2], sys.argv[7:]\nprint('========= COMPUTE-SANITIZER', flush=True)\n" + body
    )
    script.chmod(0o755)
    return script


def test_every_mode_runs_under_every_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The inner program as it is, on the CPU."""
    fake_tool(
        tmp_path,
        "code = subprocess.run(words).returncode\n"
        "if tool == 'racecheck':\n"
        "    print('========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)')\n"
        "else:\n    print('========= ERROR SUMMARY: 0 errors')\n"
        "sys.exit(code)\n",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    out = tmp_path / "out.json"
    words = ["--tools", "memcheck,racecheck", "--device", "cpu", "--no-warm-up", "--out", str(out)]
    assert sanitize.main(words) == 1
    report = json.loads(out.read_text())
    assert report["sanitizer"] == "Version 2025.1.0.0 (build 1)"
    assert [(r["tool"], r["verdict"], r["finished"]) for r in report["results"]] == [
        ("memcheck", "clean", True),
        ("racecheck", "findings", True),
    ]
    assert "memcheck   clean" in capsys.readouterr().out
    assert str(tmp_path) not in out.read_text()


def test_products_go_to_zeroed_memory_under_initcheck_alone(tmp_path: Path) -> None:
    script = fake_tool(tmp_path, f"open(r'{tmp_path}/' + tool, 'w').write(' '.join(words))\n")
    assert sanitize.main(["--sanitizer", str(script), "--no-warm-up"]) == 1
    asked = {tool: (tmp_path / tool).read_text().split().count("--zeroed-products") for tool in sanitize.TOOLS}
    assert asked == {"memcheck": 0, "initcheck": 1, "racecheck": 0}


def test_products_in_zeroed_memory_are_those_of_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = functional.linear
    monkeypatch.setattr(functional, "linear", linear)  # so that it comes back
    x, weight, bias = torch.randn(5, 8), torch.randn(6, 8), torch.randn(6)
    sanitize.zero_products()
    assert functional.linear is not linear
    torch.testing.assert_close(functional.linear(x, weight), linear(x, weight))
    torch.testing.assert_close(functional.linear(x, weight, bias), linear(x, weight, bias))


def test_a_tool_that_takes_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = fake_tool(tmp_path, "import time\nprint('SANITIZE MODE FULL', flush=True)\ntime.sleep(600)\n")
    words = ["--tools", "initcheck", "--sanitizer", str(script), "--timeout", "0.5", "--no-warm-up"]
    assert sanitize.main(words) == 1
    assert "initcheck  timed out  no summary" in capsys.readouterr().out


def test_without_the_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main(["--sanitizer", "no-such-sanitizer"]) == 2
    assert "no-such-sanitizer is not on the PATH. It comes with the CUDA toolkit" in capsys.readouterr().err
