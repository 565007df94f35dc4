"""A frozen snapshot of what an engine has done. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.graphs.dispatch import StepCount


@dataclass(frozen=True, slots=True)
class RecordingStat:
    """One recorded key: what it cost to make and what it holds."""

    mode: str
    num_tokens: int
    num_rows: int
    query_len: int | None
    num_graphs: int
    num_nodes: int
    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryStat:
    """Bytes by part. `activations` are the fixed buffers that steps and requests live in; `total` is the device's,
    None on the CPU."""

    weights: int
    kv: int
    graphs: int
    activations: int
    total: int | None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """`steps` counts by (mode, key, reason); warm-up and recording are not counted.

    `capture_sizes` are uniform batches in requests, `mixed_capture_sizes` mixed ones in tokens. `startup_s` by part.
    """

    steps: tuple[StepCount, ...]
    num_recordings: int
    recording_bytes: int
    capture_s: float
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    prefix_hit_tokens: int
    preemptions: int
    resolved_mode: str
    capture_sizes: tuple[int, ...]
    mixed_capture_sizes: tuple[int, ...]
    backend: str
    device: str
    dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    memory: MemoryStat
    num_checked: int
    recordings: tuple[RecordingStat, ...]
    startup_s: dict[str, float]
