"""The products of some rows fit an H200: they compile, nothing spills, and what they do before they wait is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MAX_SHARED_BYTES = 227 * 1024
REGISTERS_PER_SM = 64 * 1024


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_small.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles(reports: list[dict[str, Any]]) -> None:
    products = {(r["kind"], r["choices"]["TURNED"]) for r in reports if r["kernel"] == "small_gemm_kernel"}
    assert products == {(kind, turned) for kind in ("plain", "gated", "parts") for turned in (False, True)}
    assert {r["kind"] for r in reports if r["kernel"] == "add_parts_kernel"} == {"norm", "sum"}


def test_nothing_spills_and_shared_memory_fits(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["STACK"] == report["LOCAL"] == 0, report
        assert report["shared_bytes"] <= MAX_SHARED_BYTES, report
        assert report["REG"] * report["num_threads"] <= REGISTERS_PER_SM, report


def test_weights_are_asked_for_before_the_wait_and_nothing_is_touched(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        events: list[str] = report["events"]
        wait = events.index("griddepcontrol.wait")
        assert events[0] == "griddepcontrol.launch_dependents", report
        asked = {"cp.async.bulk.prefetch"} if report["choices"].get("PREFETCH") else set()
        assert set(events[1:wait]) == asked, report
        assert any(event.startswith("st.global") for event in events[wait:]), report
        assert any(event.startswith(("cp.async.c", "ld.global")) for event in events[wait:]), report
        assert sum(event.startswith("griddepcontrol") for event in events) == 2, report
    assert any(report["choices"].get("PREFETCH") for report in reports)
