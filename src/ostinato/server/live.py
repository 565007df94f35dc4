"""The bodies of `/graphs/...`. They are made of copies; `graphs_requests` alone reads the engine itself."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from ostinato.engine.llm import LLM
from ostinato.engine.stats import EngineStats
from ostinato.engine.step_log import StepRecord
from ostinato.graphs.dispatch import BatchKey
from ostinato.kv.block_pool import BlockStates

Key = tuple[int, int, int | None]
"""Tokens, rows, query length; None where rows differ."""


class Ladder(Struct):
    uniform: tuple[int, ...]
    mixed: tuple[int, ...]


class RecordingView(Struct):
    mode: str
    num_tokens: int
    num_rows: int
    query_len: int | None
    num_graphs: int
    num_nodes: int
    seconds: float
    bytes: int


class CounterView(Struct):
    mode: str
    key: Key | None
    reason: str
    count: int
    live_tokens: int
    padded_tokens: int


class MemoryView(Struct):
    """`before` the engine: the CUDA context, other processes; None on the CPU, as are `free` and `total`."""

    before: int | None
    weights: int
    kv: int
    graphs: int
    buffers: int
    libraries: int
    free: int | None
    total: int | None


class GraphsState(Struct):
    model: str
    mode: str
    backend: str
    device: str
    dtype: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    ladder: Ladder
    recordings: list[RecordingView]
    counters: list[CounterView]
    memory: MemoryView


class StepView(Struct):
    id: int
    launched_ms: float
    collected_ms: float | None
    mode: str
    key: Key | None
    reason: str
    rows: int
    tokens: int
    padded_tokens: int


class GraphsSteps(Struct):
    last: int
    steps: list[StepView]


class GraphsPool(Struct):
    num_blocks: int
    states: str


class RequestView(Struct):
    id: str
    status: str
    prompt_tokens: int
    output_tokens: int
    blocks: list[int]


def graphs_state(model: str, stats: EngineStats) -> GraphsState:
    memory = stats.memory
    return GraphsState(
        model=model,
        mode=stats.resolved_mode,
        backend=stats.backend,
        device=stats.device,
        dtype=stats.dtype,
        block_size=stats.block_size,
        num_blocks=stats.num_blocks,
        max_model_len=stats.max_model_len,
        max_num_seqs=stats.max_num_seqs,
        ladder=Ladder(stats.capture_sizes, stats.mixed_capture_sizes),
        recordings=[
            RecordingView(
                r.mode, r.num_tokens, r.num_rows, r.query_len, r.num_graphs, r.num_nodes, r.seconds, r.num_bytes
            )
            for r in stats.recordings
        ],
        counters=[
            CounterView(c.mode, _key(c.key), c.reason, c.count, c.live_tokens, c.padded_tokens) for c in stats.steps
        ],
        memory=MemoryView(
            before=memory.before,
            weights=memory.weights,
            kv=memory.kv,
            graphs=memory.graphs,
            buffers=memory.buffers,
            libraries=memory.libraries,
            free=memory.free,
            total=memory.total,
        ),
    )


def graphs_steps(last: int, steps: Sequence[StepRecord]) -> GraphsSteps:
    views = [
        StepView(s.id, s.launched_ms, s.collected_ms, s.mode, _key(s.key), s.reason, s.rows, s.tokens, s.padded_tokens)
        for s in steps
    ]
    return GraphsSteps(last, views)


def graphs_pool(states: BlockStates) -> GraphsPool:
    return GraphsPool(states.num_blocks, states.letters())


def graphs_requests(llm: LLM) -> list[RequestView]:
    """Runs on the engine's thread."""
    scheduler = llm.engine.scheduler
    return [
        RequestView(
            id=request.request_id,
            status=request.status.value,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=len(request.tokens) - request.num_prompt_tokens,
            blocks=list(scheduler.kv.table(request.request_id)),
        )
        for request in scheduler.unfinished()
    ]


def _key(key: BatchKey | None) -> Key | None:
    return None if key is None else (key.num_tokens, key.num_rows, key.query_len)
