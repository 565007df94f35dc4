"""The fused decode kernels fit an H200: nothing spills, and what the source asks of the
hardware (copies ahead, the wait, the ordered count) is in the machine code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MAX_SHARED_BYTES = 227 * 1024


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_decode_fused.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_nothing_spills_and_shared_memory_fits(reports: list[dict[str, Any]]) -> None:
    assert {report["kernel"] for report in reports} == {"decode_fused_kernel"}
    for report in reports:
        assert report["STACK"] == report["LOCAL"] == 0, report
        assert report["shared_bytes"] <= MAX_SHARED_BYTES, report


def test_the_hardware_is_asked_for_what_the_source_says(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        choices = report["choices"]
        assert report["waits"] == int(choices["PDL"]), report
        assert report["prefetches"] > 0 and (report["copies_ahead"] > 0) == (report["num_stages"] > 1), report
        assert report["ordered_counts"] == int(choices["SPLIT"]), report
