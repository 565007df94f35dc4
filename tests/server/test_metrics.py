"""/metrics parses, has vLLM's names, and adds up with what clients were told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ostinato.engine.request_stats import Histogram
from ostinato.graphs.dispatch import BatchKey
from ostinato.server.metrics import _key_label

from ..e2e.connecting import free_port, tcp
from ..e2e.models import TinyModel
from .conftest import open_llm
from .metrics_text import Samples
from .running import running

VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
}


def test_it_adds_up(model: TinyModel) -> None:
    with running(lambda: open_llm(model)) as server:
        usages = []
        for index in range(6):
            body: dict[str, Any] = {"prompt": "The same long beginning of all " + "x" * index, "temperature": 0}
            body |= {"max_tokens": 4 + index, "ignore_eos": True, "n": 2 if index == 3 else 1}
            usages.append(server.post("/v1/completions", body).json()["usage"])
        server.wait_idle()
        text = server.get("/metrics").text
        stats = server.between_steps(lambda llm: llm.stats())
        samples = Samples.parse(text)
    assert {name: samples.types[f"ostinato:{name}"] for name in VLLM} == VLLM
    assert all(sample.labels["model_name"] == "tiny" for sample in samples.samples)
    # tokens and requests, as the clients were told
    num_prompt = sum(usage["prompt_tokens"] for usage in usages) + usages[3]["prompt_tokens"]  # two answers
    num_output = sum(usage["completion_tokens"] for usage in usages)
    assert samples.total("prompt_tokens_total") == num_prompt
    assert samples.total("generation_tokens_total") == num_output
    assert samples.by_label("request_success_total", "finished_reason") == {
        "length": 7,
        "stop": 0,
        "abort": 0,
        "error": 0,
    }
    # times: one first token for each answer, one gap for every other token
    assert samples.total("time_to_first_token_seconds_count") == 7
    assert samples.total("inter_token_latency_seconds_count") == num_output - 7
    assert samples.total("e2e_request_latency_seconds_count") == 7
    first, gaps, whole = (
        samples.total(f"{name}_seconds_sum")
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    )
    assert first + gaps == pytest.approx(whole)
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        buckets = [sample.value for sample in samples.of(f"{name}_seconds_bucket")]
        assert buckets == sorted(buckets)
        assert buckets[-1] == samples.total(f"{name}_seconds_count")
    # steps: what the engine counts
    assert samples.total("steps_total") == sum(step.count for step in stats.steps)
    assert samples.total("step_live_tokens_total") == sum(step.live_tokens for step in stats.steps)
    assert samples.total("step_padded_tokens_total") == sum(step.padded_tokens for step in stats.steps)
    cached = samples.total("prefix_cache_hits_total")
    assert samples.total("prefix_cache_queries_total") == num_prompt
    assert 0 < cached < num_prompt
    assert samples.total("step_live_tokens_total") == num_prompt - cached + num_output - 7
    replayed = sum(sample.value for sample in samples.of("steps_total") if sample.labels["mode"] != "NONE")
    assert samples.total("graph_replays_total") == replayed > 0
    assert samples.total("graph_recordings") == stats.num_recordings
    # live sizes: every step has one, and its mixed tokens or rows
    live = samples.of("step_live_sizes_total")
    assert {(line.labels["query_len"], int(line.labels["size"])): line.value for line in live} == {
        (str(count.query_len or "-"), count.size): count.count for count in stats.live_sizes
    }
    assert sum(line.value for line in live) == samples.total("steps_total")
    assert sum(int(line.labels["size"]) * line.value for line in live) == samples.total("step_live_tokens_total")
    (config,) = samples.of("graph_config_info")
    limits = {"max_num_seqs": stats.max_num_seqs, "max_num_batched_tokens": stats.max_num_batched_tokens}
    assert config.value == 1
    assert config.labels == {"model_name": "tiny", "cudagraph_mode": stats.resolved_mode} | {
        name: str(limit) for name, limit in limits.items()
    }
    # blocks: each in one state
    assert samples.total("kv_blocks") == stats.num_blocks
    blocks = samples.by_label("kv_blocks", "state")
    assert (blocks["scratch"], blocks["used"]) == (1, 0)
    assert blocks["cached"] == stats.cached_blocks
    assert samples.total("kv_cache_usage_perc") == 0
    assert samples.total("num_requests_running") == samples.total("num_requests_waiting") == 0


def test_a_busy_engine_shows(model: TinyModel) -> None:
    """One row, three requests: one runs, two wait."""
    with running(lambda: open_llm(model, max_num_seqs=1)) as server:
        body = {"prompt": "abc", "max_tokens": 180, "ignore_eos": True, "n": 3}

        async def submit_and_look() -> str:
            from ostinato.engine.stream import Submission
            from ostinato.request import SamplingParams
            from ostinato.server.metrics import render

            params = SamplingParams(max_tokens=body["max_tokens"], ignore_eos=True)  # type: ignore[arg-type]
            submissions = [Submission(f"r{index}", [1, 2, 3], params) for index in range(3)]
            with await server.engine.submit(submissions) as stream:
                await anext(stream)
                return (await render(server.engine, "tiny")).decode()

        samples = Samples.parse(server.on_loop(submit_and_look))
        assert samples.total("num_requests_running") == 1
        assert samples.total("num_requests_waiting") == 2
        assert samples.total("kv_cache_usage_perc") > 0
        server.wait_idle()


def test_a_connector_shows(model: TinyModel, tmp_path: Path) -> None:
    """Two servers in turn over one folder: what the first saves, the second loads."""
    transfer = {"kv_connector": "DiskConnector", "kv_connector_extra_config": {"path": str(tmp_path)}}
    transfer["kv_connector_extra_config"]["cpu_bytes_to_use"] = 1 << 22  # type: ignore[index]
    body = {"prompt": "The same long beginning " * 3, "temperature": 0, "max_tokens": 3, "ignore_eos": True}
    seen = []
    for _ in range(2):
        with running(lambda: open_llm(model, kv_transfer_config=transfer)) as server:
            num_prompt = server.post("/v1/completions", body).json()["usage"]["prompt_tokens"]
            server.wait_idle()
            seen.append(Samples.parse(server.get("/metrics").text))
    first, second = seen
    hits = (num_prompt - 1) // 16 * 16
    assert first.types["ostinato:external_prefix_cache_hits"] == "counter"
    assert first.total("external_prefix_cache_queries_total") == num_prompt
    assert first.total("external_prefix_cache_hits_total") == 0
    saved = first.total("kv_connector_saved_blocks_total") + first.total("kv_connector_pending_saves")
    assert saved == (num_prompt + 2) // 16
    assert second.total("external_prefix_cache_hits_total") == hits > 0
    assert second.total("kv_connector_loaded_blocks_total") == hits / 16
    assert second.total("kv_connector_deferred_requests_total") == 1
    for name in ("load_failures_total", "save_failures_total"):
        assert first.total(f"kv_connector_{name}") == second.total(f"kv_connector_{name}") == 0
    assert second.total("kv_connector_waiting_requests") == second.total("kv_connector_async_loads_total") == 0


def test_blocks_from_another_process_are_counted_by_transport(model: TinyModel) -> None:
    body = {"prompt": "The same long beginning " * 3, "temperature": 0, "max_tokens": 1, "ignore_eos": True}
    port = free_port()
    with (
        running(lambda: open_llm(model, kv_transfer_config=tcp(port, "kv_producer", transport="tcp"))) as producer,
        running(lambda: open_llm(model, kv_transfer_config=tcp(port, "kv_consumer", wait_s=60.0))) as consumer,
    ):
        num_prompt = producer.post("/v1/completions", body).json()["usage"]["prompt_tokens"]
        assert consumer.post("/v1/completions", body).status_code == 200
        consumer.wait_idle()
        samples = Samples.parse(consumer.get("/metrics").text)
    assert samples.types["ostinato:kv_connector_fetched_blocks"] == "counter"
    expected = {"tcp": (num_prompt - 1) // 16, "nixl": 0}
    assert samples.by_label("kv_connector_fetched_blocks_total", "transport") == expected


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert (histogram.num_observed, histogram.total) == (5, 7.5)


def test_key_labels() -> None:
    assert [_key_label(key) for key in (None, BatchKey(64, 8, None), BatchKey(4, 4, 1))] == ["", "64/8/-", "4/4/1"]
