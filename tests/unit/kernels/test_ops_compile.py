"""Every kernel compiles for an H200 in bfloat16, without spilling registers."""

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
    script = Path(__file__).with_name("compile_ops.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles(reports: list[dict[str, Any]]) -> None:
    assert {report["kernel"] for report in reports} == {
        "rms_norm_kernel", "rope_kernel", "silu_mul_kernel", "prepare_kernel", "embed_kernel", "scatter_kernel",
        "advance_kernel", "chunk_kernel", "pick_kernel", "logprobs_chunk_kernel", "logprobs_merge_kernel",
    }  # fmt: skip


def test_nothing_spills_and_shared_memory_fits(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["STACK"] == report["LOCAL"] == 0, report
        assert report["shared_bytes"] <= MAX_SHARED_BYTES, report


def test_all_but_the_first_kernels_wait_for_their_predecessor(reports: list[dict[str, Any]]) -> None:
    """`prepare` is launched in the ordinary way, which is what kernels that read its output early rely on."""
    for report in reports:
        assert report["waits"] == int(report["kernel"] not in ("prepare_kernel", "scatter_kernel")), report


def test_chunks_round_a_product_and_a_sum_one_after_the_other(reports: list[dict[str, Any]]) -> None:
    """As heads that choose tokens do (`triton_sampling.FP_FUSION`)."""
    chunks = [report for report in reports if report["kernel"] == "chunk_kernel"]
    assert [report["choices"]["TILED"] for report in chunks] == [False, True]
    assert all(report["num_fused"] == 0 for report in chunks)
