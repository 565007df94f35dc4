"""The attention kernels fit an H200: they compile, nothing spills, and several programs share a multiprocessor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MAX_SHARED_BYTES = 227 * 1024
SHARED_BYTES_PER_SM = 228 * 1024
REGISTERS_PER_SM = 64 * 1024


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_attention.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles(reports: list[dict[str, Any]]) -> None:
    assert {report["kernel"] for report in reports} == {
        "decode_kernel", "prefill_kernel", "combine_kernel", "kv_write_kernel", "gather_blocks_kernel",
    }  # fmt: skip


def test_nothing_spills_and_shared_memory_fits(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["STACK"] == report["LOCAL"] == 0, report
        assert report["shared_bytes"] <= MAX_SHARED_BYTES, report


def test_two_plain_decode_programs_share_a_multiprocessor(reports: list[dict[str, Any]]) -> None:
    """`choose_num_splits` counts on it."""
    plain = [r for r in reports if r["kernel"] == "decode_kernel" and r["choices"]["QUERY_LEN"] == 1]
    assert len(plain) >= 5
    for report in plain:
        assert 2 * (report["shared_bytes"] + 1024) <= SHARED_BYTES_PER_SM, report
        assert 2 * report["REG"] * 32 * report["num_warps"] <= REGISTERS_PER_SM, report


def test_sixteen_bit_prefill_uses_warpgroup_products(reports: list[dict[str, Any]]) -> None:
    prefill = [r for r in reports if r["kernel"] == "prefill_kernel"]
    assert len(prefill) >= 4 and all(report["warpgroup_products"] for report in prefill)
