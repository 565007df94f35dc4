"""Heads that choose tokens fit an H200: they compile, nothing spills, and no sum is rounded as the sampler's is not."""

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
    script = Path(__file__).with_name("compile_head.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_heads_compile_in_both_orders_of_operands(reports: list[dict[str, Any]]) -> None:
    assert {report["choices"]["TURNED"] for report in reports} == {False, True}
    assert {report["choices"]["EVEN_N"] for report in reports} == {False, True}


def test_nothing_spills_and_shared_memory_fits(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["STACK"] == report["LOCAL"] == 0, report
        assert report["shared_bytes"] <= MAX_SHARED_BYTES, report
        assert report["REG"] * report["num_threads"] <= REGISTERS_PER_SM, report


def test_a_product_and_a_sum_are_rounded_one_after_the_other(reports: list[dict[str, Any]]) -> None:
    """Tokens of a head and of the sampler over its stored logits are equal only if both round alike."""
    assert all(report["num_fused"] == 0 for report in reports)


def test_only_weights_are_touched_before_the_wait(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        events: list[str] = report["events"]
        wait = events.index("griddepcontrol.wait")
        assert events[0] == "griddepcontrol.launch_dependents", report
        assert set(events[1:wait]) == ({"cp.async.bulk.prefetch"} if report["choices"]["PREFETCH"] else set()), report
        assert any(event.startswith("st.global") for event in events[wait:]), report
