"""Every measurement on random weights: that it measures what it says. How long anything takes is not tested."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM
from ostinato.cli.bench import profile
from ostinato.cli.bench.fresh import run_fresh
from ostinato.cli.bench.kernel_times import KernelEvent
from ostinato.cli.bench.throughput import draw_lengths
from ostinato.cli.bench.tpot import Prompts
from ostinato.cli.main import main
from ostinato.errors import OstinatoError

TINY = ["--load-format", "dummy", "--device", "cpu", "--max-num-batched-tokens", "32"]


def bench(what: str, model: str, options: str, folder: Path) -> dict[str, Any]:
    file = folder / f"{what}.json"
    assert main(["bench", what, model, *TINY, *options.split(), "--json", str(file)]) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    assert report["benchmark"] == what
    assert (report["model"]["name"], report["model"]["num_layers"], report["model"]["dtype"]) == ("tiny", 3, "float32")
    assert {"python", "torch", "ostinato", "device"} <= report["environment"].keys()
    assert report["command"].startswith(f"ostinato bench {what} tiny ")
    assert str(folder) not in file.read_text()
    return report


def test_decode(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench("decode", model, "--batch 1,3 --prompt-len 5 --output-len 12 --bandwidth 0.01", tmp_path)
    assert "of floor" in capsys.readouterr().out
    assert report["engine"]["mode"] == "FULL_AND_PIECEWISE"
    assert [row["batch"] for row in report["timings"]] == [1, 3]
    kv_bytes = 2 * 3 * 2 * 12 * 4  # K and V, layers, heads, head size, float32
    assert report["kv_bytes_per_token"] == kv_bytes
    for row in report["timings"]:
        assert (row["runtime_mode"], row["graph_launches"], row["padded_rows"]) == ("FULL", 1, row["batch"])
        assert row["mean_context"] == 11.0  # contexts of 6 to 16 tokens
        assert row["read_bytes"] == report["weight_bytes_per_step"] + row["batch"] * 11 * kv_bytes
        assert row["floor_ms"] == pytest.approx(row["read_bytes"] / 1e7)
        assert row["floor_share"] == pytest.approx(row["floor_ms"] / row["tpot_min_ms"])
        assert row["idle_share"] is None
        assert row["host_us"] > 0
        assert row["num_observed_steps"] == 11 - 2 * 2 - 1


def test_decode_runs_in_the_mode_that_was_asked_for(model: str, tmp_path: Path) -> None:
    report = bench("decode", model, "--batch 2 --prompt-len 3 --output-len 4 --cudagraph-mode piecewise", tmp_path)
    (row,) = report["timings"]
    assert (row["runtime_mode"], row["graph_launches"], row["eager_calls"]) == ("PIECEWISE", 4, 3)
    assert row["floor_ms"] is None
    assert row["host_us"] is None  # too few steps for a steady state


def test_prefill(model: str, tmp_path: Path) -> None:
    report = bench("prefill", model, "--batch 1,2 --prompt-len 4,40", tmp_path)
    rows = report["timings"]
    assert [(row["batch"], row["prompt_len"]) for row in rows] == [(1, 4), (1, 40), (2, 4), (2, 40)]
    assert rows[2]["flops"] == 2 * rows[0]["flops"]
    for row in rows:
        fastest = row["ttft_ms"]["min"] / 1e3
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * row["prompt_len"] / fastest)
        assert row["tflop_per_s"] == pytest.approx(row["flops"] / fastest / 1e12)


def test_throughput(model: str, tmp_path: Path) -> None:
    options = "--num-prompts 7 --min-len 3 --max-len 9 --max-num-seqs 4 --runs 2 --seed 5"
    report = bench("throughput", model, options, tmp_path)
    lengths = draw_lengths(7, 3, 9, 5)
    num_in, num_out = sum(a for a, _ in lengths), sum(b for _, b in lengths)
    assert (report["workload"]["prompt_tokens"], report["workload"]["output_tokens"]) == (num_in, num_out)
    assert len(report["results"]) == 2
    rates = sorted(num_out / result["time_s"] for result in report["results"])
    assert report["output_tokens_per_s"]["min"] == pytest.approx(rates[0])
    assert report["output_tokens_per_s"]["max"] == pytest.approx(rates[1])
    assert report["output_tokens_per_s"]["median"] == pytest.approx(sum(rates) / 2)
    for result in (report["warm_up"], *report["results"]):
        live = sum(row["steps"] * row["mean_live_tokens"] for row in result["steps"])
        assert live == pytest.approx(num_in + num_out - 7)  # a prompt's last token and an output's first share a step
        assert all(row["mean_padded_tokens"] >= row["mean_live_tokens"] for row in result["steps"])
        assert result["preemptions"] == 0


def test_drawn_lengths_stay_inside_and_repeat() -> None:
    lengths = draw_lengths(200, 3, 9, 1)
    assert {length for pair in lengths for length in pair} == set(range(3, 10))
    assert lengths == draw_lengths(200, 3, 9, 1)
    assert lengths != draw_lengths(200, 3, 9, 2)


def test_startup(model: str, tmp_path: Path) -> None:
    report = bench("startup", model, "--runs 2 --max-num-seqs 4 --prompt-len 6", tmp_path)
    assert len(report["results"]) == 2
    assert {"interpreter", "import", "weights", "recording", "kv", "first token"} <= report["parts_s"].keys()
    for result in report["results"]:
        assert sum(result["parts_s"].values()) == pytest.approx(result["first_token_s"])
        assert result["first_token_s"] > result["ready_s"]
        assert result["num_recordings"] == len(report["recordings"]) > 0
    assert min(result["first_token_s"] for result in report["results"]) == report["first_token_s"]["min"]


def test_modes_each_in_a_process_of_its_own(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ostinato.cli.bench import fresh

    jobs = []
    monkeypatch.setattr(fresh, "run_fresh", lambda job: jobs.append(job) or run_fresh(job))
    options = "--batch 1,3 --prompt-len 5 --output-len 6 --bandwidth 0.01"
    report = bench("modes", model, options, tmp_path)
    assert "of floor" in capsys.readouterr().out
    modes = ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"]
    assert [job["options"]["cudagraph_mode"] for job in jobs] == modes
    assert [result["mode"] for result in report["results"]] == modes
    assert report["floor_ms"] == pytest.approx(report["weight_bytes_per_step"] / 1e7)
    by_mode = {result["mode"]: result for result in report["results"]}
    assert by_mode["NONE"]["num_recordings"] == 0
    assert all(row["graph_launches"] is None for row in by_mode["NONE"]["timings"])
    for row in by_mode["PIECEWISE"]["timings"]:
        assert (row["runtime_mode"], row["graph_launches"], row["eager_calls"]) == ("PIECEWISE", 4, 3)
    for mode in ("FULL", "FULL_AND_PIECEWISE"):
        for row in by_mode[mode]["timings"]:
            assert (row["runtime_mode"], row["graph_launches"], row["eager_calls"]) == ("FULL", 1, 0)
            assert row["padded_rows"] == row["batch"]
            assert row["kernel_nodes"] > 0
            assert row["spread_ms"] >= 0
            assert row["ttft_ms"] > 0
    assert len(by_mode["FULL"]["recordings"]) == by_mode["FULL"]["num_recordings"]


def test_modes_under_both_cuts(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--batch 2 --prompt-len 5 --output-len 6 --modes PIECEWISE,FULL --cuts attention,kv_gather"
    results = bench("modes", model, options, tmp_path)["results"]
    assert "kv_gather" in capsys.readouterr().out
    assert [(result["mode"], result["cut"]) for result in results] == [
        ("PIECEWISE", "attention"),
        ("FULL", "attention"),
        ("PIECEWISE", "kv_gather"),
        ("FULL", "kv_gather"),
    ]
    whole, cut, gathered = results[1]["timings"][0], results[0]["timings"][0], results[2]["timings"][0]
    for row in (cut, gathered):
        assert (row["runtime_mode"], row["graph_launches"], row["eager_calls"]) == ("PIECEWISE", 4, 3)
    assert gathered["kernel_nodes"] == cut["kernel_nodes"] + 3, "attention, of three layers"
    assert whole["kernel_nodes"] > 0
    options = "--batch 1 --prompt-len 5 --output-len 4 --modes PIECEWISE --cudagraph-cut kv_gather"
    assert [result["cut"] for result in bench("modes", model, options, tmp_path)["results"]] == ["kv_gather"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["modes", "--cuts", "head"], "--cuts head: must be one or more of attention, kv_gather"),
        (["modes", "--cuts", "attention", "--cudagraph-cut", "attention"], "goes through the cuts in --cuts"),
        (["profile", "--batch", "1"], "needs a GPU"),
        (
            ["decode", "--bandwidth", "auto", "--batch", "2", "--prompt-len", "9"],
            "--bandwidth auto measures a CUDA device",
        ),
        (["decode", "--batch", "2", "--prompt-len", "200"], "need a model length of 329, and it is 256"),
        (["prefill", "--prompt-len", "20", "--max-model-len", "20"], "need a model length of 21, and it is 20"),
        (["throughput", "--max-num-seqs", "4"], "need a model length of 2048"),
    ],
)
def test_errors_before_anything_is_measured(
    model: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", words[0], model, *TINY, *words[1:]]) == 2
    assert message in capsys.readouterr().err


def test_errors_of_a_fresh_process_are_passed_on(model: str) -> None:
    job = {"what": "startup", "model": model, "vocab_size": 97, "prompt_len": 40}
    options = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 2, "max_model_len": 64}
    with pytest.raises(OstinatoError, match="needs 3 KV blocks of 16 and the pool has 1"):
        run_fresh(job | {"options": options | {"num_gpu_blocks_override": 2, "enforce_eager": True}})
    with pytest.raises(OstinatoError, match="the process that measured nonesuch ended with exit code 1"):
        run_fresh(job | {"what": "nonesuch"})


def test_profile_leaves_the_engine_as_it_was(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the profiler: which steps it would see, and that the requests are gone afterwards."""
    with LLM(
        model, load_format="dummy", device="cpu", max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64
    ) as llm:
        before: list[int] = []

        @contextmanager
        def collecting() -> Iterator[list[KernelEvent]]:
            before.append(sum(step.count for step in llm.stats().steps))
            yield []
            before.append(sum(step.count for step in llm.stats().steps))

        monkeypatch.setattr(profile, "_collecting", collecting)
        profile._profile(llm, Prompts(97), batch=3, context=20, num_steps=8)
        assert before[1] - before[0] == 8 + profile._WARM_STEPS
        assert not llm.engine.has_unfinished
        with pytest.raises(OstinatoError, match="reached the end of the model length"):
            profile._profile(llm, Prompts(97), batch=3, context=20, num_steps=60)
        assert not llm.engine.has_unfinished
