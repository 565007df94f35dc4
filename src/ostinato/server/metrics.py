"""`/metrics`: vLLM's names and meanings, under the prefix `ostinato:`, where the same thing exists; and our own.

Everything is counted where it happens, as plain numbers; here they are only written down. The requests' side is the
event loop's, the engine's side is copied on the engine's thread between two steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ostinato.connectors.protocol import ConnectorStats
from ostinato.engine.async_engine import AsyncEngine
from ostinato.engine.llm import LLM
from ostinato.engine.request_stats import Histogram, RequestStats
from ostinato.engine.stats import EngineStats
from ostinato.errors import UnavailableError
from ostinato.graphs.dispatch import BatchKey
from ostinato.graphs.ladder import coarse_size
from ostinato.graphs.mode import RuntimeMode
from ostinato.kv.block_pool import BlockStates

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "ostinato:"


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine between two steps."""

    stats: EngineStats
    blocks: BlockStates
    num_running: int
    num_waiting: int
    num_deferred: int
    prefix_query_tokens: int

    @classmethod
    def take(cls, llm: LLM) -> EngineSnapshot:
        """On the engine's thread."""
        scheduler = llm.engine.scheduler
        return cls(
            stats=llm.stats(),
            blocks=scheduler.kv.states(),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_deferred=(scheduler.num_deferred if scheduler.num_waiting else 0) + scheduler.num_loading,
            prefix_query_tokens=scheduler.kv.prefix_query_tokens,
        )


async def render(engine: AsyncEngine, model_name: str) -> bytes:
    """Prometheus' text form. Of an engine that is not there, only what its requests have added up to."""
    try:
        snapshot = await engine.call(EngineSnapshot.take)
    except UnavailableError:
        snapshot = None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(model_name, engine.request_stats, snapshot))
    return generate_latest(registry)


class _Families(Collector):
    """All metrics of one moment."""

    def __init__(self, model_name: str, requests: RequestStats, snapshot: EngineSnapshot | None) -> None:
        self._model, self._requests, self._snapshot = model_name, requests, snapshot

    def collect(self) -> Iterable[Metric]:
        yield from self._request_side()
        if self._snapshot is not None:
            yield from self._engine_side(self._snapshot)
            if self._snapshot.stats.connector is not None:
                yield from self._connector_side(self._snapshot.stats.connector, self._snapshot.num_deferred)
            yield from self._graph_side(self._snapshot.stats)

    def _request_side(self) -> Iterable[Metric]:
        stats = self._requests
        yield self._counter("prompt_tokens", "Tokens of prompts that were processed.", stats.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens that were generated.", stats.num_generated_tokens)
        yield self._counter("requests_refused", "Requests answered 429: too many waited.", stats.num_refused)
        yield self._labelled(
            CounterMetricFamily,
            "request_success",
            "Requests that have ended, by reason; abort is a client that left.",
            ["finished_reason"],
            [([reason], count) for reason, count in stats.finished.items()],
        )
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From the arrival of a request to its first token.", stats.ttft_s),
            ("inter_token_latency_seconds", "From one token of a request to its next.", stats.inter_token_s),
            ("e2e_request_latency_seconds", "From the arrival of a request to its last token.", stats.e2e_s),
        ):
            yield self._histogram(name, text, histogram)

    def _engine_side(self, now: EngineSnapshot) -> Iterable[Metric]:
        blocks = now.blocks
        yield self._gauge("num_requests_running", "Requests that hold a row of the batch.", now.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for one.", now.num_waiting)
        usage = blocks.num_used / (blocks.num_blocks - 1)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV blocks that requests hold: 1 is all.", usage)
        yield self._labelled(
            GaugeMetricFamily,
            "kv_blocks",
            "KV blocks by state; cached ones are free and can still be found by their content.",
            ["state"],
            [
                (["used"], blocks.num_used),
                (["free"], len(blocks.free)),
                (["cached"], len(blocks.cached)),
                (["scratch"], 1),
            ],
        )
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", now.prefix_query_tokens)
        yield self._counter("prefix_cache_hits", "Tokens that it had.", now.stats.prefix_hit_tokens)
        yield self._counter("num_preemptions", "Requests that gave up their row for lack of KV.", now.stats.preemptions)

    def _connector_side(self, now: ConnectorStats, num_deferred: int) -> Iterable[Metric]:
        for name, text, number in (
            ("external_prefix_cache_queries", "Tokens that the KV connector was asked for.", now.query_tokens),
            ("external_prefix_cache_hits", "Tokens that came from it.", now.hit_tokens),
            ("kv_connector_loaded_blocks", "KV blocks that were loaded.", now.loaded_blocks),
            ("kv_connector_async_loads", "Requests that were loaded for beside the steps.", now.async_loads),
            ("kv_connector_saved_blocks", "KV blocks that were saved.", now.saved_blocks),
            ("kv_connector_load_failures", "Loads that broke off; the rest was computed.", now.failed_loads),
            ("kv_connector_save_failures", "KV blocks that could not be saved.", now.failed_saves),
            ("kv_connector_deferred_requests", "Requests that waited for KV to come.", now.deferred_requests),
        ):
            yield self._counter(name, text, number)
        yield self._labelled(
            CounterMetricFamily,
            "kv_connector_fetched_blocks",
            "KV blocks that came from another process, by transport.",
            ["transport"],
            [([transport], count) for transport, count in now.fetched_blocks.items()],
        )
        yield self._gauge("kv_connector_waiting_requests", "Requests that wait for KV to come.", num_deferred)
        yield self._gauge("kv_connector_pending_saves", "KV blocks on their way out.", now.pending_saves)
        yield self._gauge("kv_connector_host_blocks", "KV blocks in host memory.", now.held_blocks)
        yield self._gauge("kv_connector_host_capacity", "KV blocks that it has room for.", now.capacity_blocks)

    def _graph_side(self, stats: EngineStats) -> Iterable[Metric]:
        rows = [([step.mode, _key_label(step.key), step.reason], step) for step in stats.steps]
        for name, text, field in (
            ("steps", "Steps by mode, key (tokens/rows/query length) and reason.", "count"),
            ("step_live_tokens", "Tokens that steps were asked for.", "live_tokens"),
            ("step_padded_tokens", "Tokens that steps computed, padding included.", "padded_tokens"),
        ):
            yield self._labelled(
                CounterMetricFamily,
                name,
                text,
                ["mode", "key", "reason"],
                [(labels, getattr(step, field)) for labels, step in rows],
            )
        live: dict[tuple[str, int], int] = {}
        for line in stats.live_sizes:
            index = str(line.query_len or "-"), coarse_size(line.size)
            live[index] = live.get(index, 0) + line.count
        yield self._labelled(
            CounterMetricFamily,
            "step_live_sizes",
            "Steps by live size: rows of query_len tokens, or tokens where that is -; above 512 in 32 sizes an octave.",
            ["query_len", "size"],
            [([query_len, str(size)], count) for (query_len, size), count in live.items()],
        )
        limits = [stats.resolved_mode, str(stats.max_num_seqs), str(stats.max_num_batched_tokens)]
        yield self._labelled(
            GaugeMetricFamily,
            "graph_config_info",
            "Always 1; the labels are the mode and the scheduler's limits, where ladders end.",
            ["cudagraph_mode", "max_num_seqs", "max_num_batched_tokens"],
            [(limits, 1)],
        )
        replays = sum(step.count for step in stats.steps if step.mode != RuntimeMode.NONE)
        yield self._counter("graph_replays", "Steps that replayed a recording.", replays)
        yield self._gauge("graph_recordings", "Recordings that exist.", stats.num_recordings)
        yield self._gauge("graph_recording_bytes", "Device memory that they hold.", stats.recording_bytes)
        yield self._gauge("graph_recording_seconds", "Time that it took to make them.", stats.capture_s)

    # -- shapes ------------------------------------------------------------------------------------------------------

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._labelled(CounterMetricFamily, name, text, [], [([], value)])

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._labelled(GaugeMetricFamily, name, text, [], [([], value)])

    def _labelled(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        labels: Sequence[str],
        rows: Iterable[tuple[Sequence[str], float]],
    ) -> Metric:
        family = kind(PREFIX + name, text, labels=["model_name", *labels])
        for values, number in rows:
            family.add_metric([self._model, *values], number)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        bounds = [*map(str, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
        family.add_metric([self._model], buckets, histogram.total)
        return family


def _key_label(key: BatchKey | None) -> str:
    """`64/8/1`: tokens, rows, query length, `-` where rows differ; empty for an eager step."""
    return "" if key is None else f"{key.num_tokens}/{key.num_rows}/{key.query_len or '-'}"
