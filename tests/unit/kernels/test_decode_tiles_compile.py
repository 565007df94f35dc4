"""The kernels around the list of tiles fit an H200: nothing spills, as many programs as their config says share a
multiprocessor, each with as many tiles on their way, and little is done before the wait for the predecessor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ostinato.kernels.decode_tiles import TileConfig, tile_config

SHARED_BYTES_PER_SM = 228 * 1024
MAX_SHARED_BYTES = 227 * 1024
REGISTERS_PER_SM = 64 * 1024


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_decode_tiles.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def attention(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [report for report in reports if report["kernel"] == "attend_tiles_kernel"]
    assert len(found) >= 14 and {report["choices"]["SCALED"] for report in found} == {False, True}
    return found


def config_of(report: dict[str, Any]) -> TileConfig:
    return tile_config(report["choices"]["HEAD_SIZE"], 2, 1 if report["choices"]["SCALED"] else 2)


def test_nothing_spills(reports: list[dict[str, Any]]) -> None:
    names = {"plan_tiles_kernel", "plan_flash_kernel", "attend_tiles_kernel", "rope_write_kernel"}
    assert {report["kernel"] for report in reports} == names
    for report in reports:
        assert report["STACK"] == report["LOCAL"] == 0, report


def test_the_programs_of_a_multiprocessor_fit(attention: list[dict[str, Any]]) -> None:
    """The list is divided among as many; a program more would run when the others have ended."""
    for report in attention:
        count = config_of(report).programs_per_sm
        assert count * report["shared_bytes"] <= MAX_SHARED_BYTES, report
        assert count * (report["shared_bytes"] + 1024) <= SHARED_BYTES_PER_SM, report
        # the device gives each warp registers in units of 256
        registers = (report["REG"] * 32 + 255) // 256 * 256 * report["num_warps"]
        assert count * registers <= REGISTERS_PER_SM, report


def test_as_many_tiles_are_on_their_way_as_the_stages_say(attention: list[dict[str, Any]]) -> None:
    for report in attention:
        in_flight = (config_of(report).num_stages - 1) // 2
        assert report["tile_buffers"] == [in_flight, in_flight], report
        assert report["copies_ahead"] > 0, report


def test_before_the_wait_the_number_of_tiles_is_read_and_nothing_is_written(reports: list[dict[str, Any]]) -> None:
    """Of keys and values a predecessor may still write some."""
    for report in reports:
        choices = report["choices"]
        assert (report["waits"] > 0) == choices.get("PDL", False), report
        assert report["early_writes"] == 0, report
        tiled = report["kernel"] == "attend_tiles_kernel" and choices["PDL"]
        assert report["early_loads"] == (["i32"] if tiled else []), report
        assert report["num_early_loads"] == len(report["early_loads"]), report


def test_a_row_of_several_programs_is_counted_in_order(attention: list[dict[str, Any]]) -> None:
    """A share can end one row that began elsewhere, and begin another that goes on."""
    assert {report["ordered_counts"] for report in attention} == {2}
