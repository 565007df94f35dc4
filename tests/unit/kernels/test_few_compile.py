"""The few-row projections fit an H200: they compile, nothing spills, and what they do before they wait is right."""

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
    script = Path(__file__).with_name("compile_few.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles(reports: list[dict[str, Any]]) -> None:
    kinds = {(report["kernel"], report["kind"]) for report in reports}
    assert kinds == {
        ("norm_linear_kernel", "norm"), ("norm_linear_kernel", "gated"), ("linear_residual_kernel", "residual"),
        ("dot_kernel", "norm"), ("dot_kernel", "gated"), ("dot_kernel", "residual"),
    }  # fmt: skip


def test_nothing_spills_and_shared_memory_fits(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["STACK"] == report["LOCAL"] == 0, report
        assert report["shared_bytes"] <= MAX_SHARED_BYTES, report
        assert report["REG"] * report["num_threads"] <= REGISTERS_PER_SM, report


def test_only_weights_are_touched_before_the_wait(reports: list[dict[str, Any]]) -> None:
    """The dependents are let go first; then weights, 16 bytes a load, and prefetches; the rest waits."""
    for report in reports:
        events: list[str] = report["events"]
        wait = events.index("griddepcontrol.wait")
        assert events[0] == "griddepcontrol.launch_dependents", report
        early, late = set(events[1:wait]), events[wait + 1 :]
        streamed = {event for event in early if "evict_first" in event}
        assert streamed and all(event.endswith("v4.b32") for event in streamed), report
        # Beside the streamed weights only the norm's weight is read, and nothing is written.
        assert not any(event.startswith("st.") for event in early), report
        plain = [event for event in early if event.startswith("ld.") and event not in streamed]
        assert not plain or report["kernel"] == "norm_linear_kernel", report
        assert any(event.startswith("st.global") for event in late), report
        assert sum(event.startswith("griddepcontrol") for event in events) == 2, report
