"""`plan` says beforehand what an engine then has."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ostinato import LLM
from ostinato.cli.main import main


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_agrees_with_the_engine(model: str, small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    facts = plan(capsys, model, *small)
    options = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 32}
    with LLM(model, max_model_len=64, **options) as llm:
        stats, runner = llm.stats(), llm.engine.runner
        assert facts["weight_bytes"] == runner.model.weights.num_bytes()
        assert facts["state_bytes"] == runner.state.num_bytes()
        assert facts["buffer_bytes"] == runner.buffers.num_bytes()
        assert facts["num_recordings"] == stats.num_recordings
        assert facts["uniform_sizes"] == list(stats.capture_sizes)
        assert facts["mixed_sizes"] == list(stats.mixed_capture_sizes)
        assert facts["num_blocks"] == stats.num_blocks
        assert facts["dtype"] == stats.dtype == "float32"


def test_for_a_gpu_that_is_not_here(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = plan(capsys, model, "--load-format", "dummy", "--memory", "2GiB", "--overhead", "500MiB")
    assert (facts["device"], facts["dtype"]) == ("cuda", "bfloat16")
    assert facts["num_parameters"] == facts["weight_bytes"] // 2
    assert facts["kv_bytes_per_token"] == 2 * 3 * 2 * 12 * 2  # K and V, layers, heads, head size, bytes
    parts = ("weight", "state", "buffer", "kv", "overhead")
    used = sum(facts[f"{part}_bytes"] for part in parts) + facts["activation_bytes_estimate"]
    budget = int(2 * 2**30 * 0.9)
    assert 0 <= budget - used < 16 * facts["kv_bytes_per_token"]
    assert facts["kv_tokens"] == 16 * (facts["num_blocks"] - 1)
    assert facts["max_concurrency"] == pytest.approx(facts["kv_tokens"] / 256, abs=0.01)


def test_the_tables_for_flash_attention_are_counted(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU that is not here nobody knows whether "auto" takes it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = (model, "--load-format", "dummy", "--memory", "2GiB", "--max-model-len", "64", "--max-num-seqs", "4")
    sizes = {name: plan(capsys, *words, "--attention-backend", name) for name in ("auto", "FLASH_ATTN")}
    more = sizes["FLASH_ATTN"]["buffer_bytes"] - sizes["auto"]["buffer_bytes"]
    assert more == 4 * (5 * 4 + 6 + 5 + 5)  # tables, first tokens, queries, keys of 4 rows and one of padding


def test_the_workspace_of_a_cut_is_counted(model: str, small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    plain, facts = plan(capsys, model, *small), plan(capsys, model, *small, "--cudagraph-cut", "kv_gather")
    assert (plain["cudagraph_cut"], plain["gather_bytes"]) == ("attention", None)
    assert facts["gather_bytes"] == 4 * 64 * 2 * 2 * 12 * 4  # rows, tokens, K and V, heads, head size, float32
    assert facts["buffer_bytes"] - plain["buffer_bytes"] == 4 * 4 * 4 + 4 * 4  # its tables
    options = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 32}
    with LLM(model, max_model_len=64, cudagraph_cut="kv_gather", **options) as llm:
        assert facts["buffer_bytes"] + facts["gather_bytes"] == llm.engine.runner.buffers.num_bytes()
    words = [model, "--load-format", "dummy", "--cudagraph-cut", "kv_gather", "--max-num-batched-tokens", "65536"]
    assert main(["plan", *words, "--memory", "2GiB", "--max-num-seqs", "65536"]) == 2
    err = capsys.readouterr().err
    assert f"activations, {65536 * 256 * 2 * 2 * 12 * 2 >> 20} MiB of them for cudagraph_cut='kv_gather'" in err
    assert "lower --max-num-seqs, --max-model-len or" in err


def test_too_small_a_device_is_refused_with_numbers(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--load-format", "dummy", "--memory", "1GiB"]) == 2
    err = capsys.readouterr().err
    assert "921 MiB (0.9 of 1024 MiB) do not hold" in err
    assert "1024 MiB overhead" in err
    # the remedies: less of everything, or less assumed
    assert main(["plan", model, "--load-format", "dummy", "--memory", "1GiB", "--overhead", "100MiB"]) == 0


def test_table(model: str, small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, *small]) == 0
    out = capsys.readouterr().out
    assert "weights" in out
    assert "uniform batches, in requests: 1, 2, 4" in out
    assert "mixed batches, in tokens: 1, 2, 4, 8, 16, 24, 32" in out
    assert main(["plan", model, *small, "--enforce-eager"]) == 0
    assert "mode NONE: 0 recordings" in capsys.readouterr().out


def test_reads_no_weights_but_wants_them_there(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--memory", "2GiB"]) == 2
    assert "has no *.safetensors" in capsys.readouterr().err
