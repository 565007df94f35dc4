"""A frozen snapshot of what an engine has done. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostinato.connectors.protocol import ConnectorStats
from ostinato.graphs.dispatch import LiveCount, StepCount

if TYPE_CHECKING:
    from ostinato.graphs.store import StoredRecording


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


def recording_stats(recordings: Iterable[StoredRecording]) -> tuple[RecordingStat, ...]:
    return tuple(
        RecordingStat(
            mode=line.mode.value,
            num_tokens=line.key.num_tokens,
            num_rows=line.key.num_rows,
            query_len=line.key.query_len,
            num_graphs=line.num_graphs,
            num_nodes=line.num_nodes,
            seconds=line.capture_s,
            num_bytes=line.bytes,
        )
        for line in recordings
    )


@dataclass(frozen=True, slots=True)
class MemoryStat:
    """Bytes of the device by part. `free`, `total` and `before` are None on the CPU, which is not the engine's alone.

    before      in use before the engine was made: the CUDA context, torch, other processes.
    weights     parameters; nothing while they are given back.
    kv          what is mapped of the KV cache, the scratch block included.
    graphs      what recordings hold: their results and the driver's share, as the device's free memory shrank.
    buffers     the fixed tensors that requests and steps live in.
    libraries   what the first steps made the libraries take: code of kernels, workspaces.
    activations what an eager step takes for a moment, and finds free.
    """

    before: int | None
    weights: int
    kv: int
    graphs: int
    buffers: int
    libraries: int
    activations: int
    free: int | None
    total: int | None

    @property
    def unaccounted(self) -> int | None:
        """What the device has more in use than the parts add up to: rounding, activations that torch's allocator holds
        back for the next eager step, and whoever came since."""
        if self.total is None or self.free is None or self.before is None:
            return None
        known = self.before + self.weights + self.kv + self.graphs + self.buffers + self.libraries
        return self.total - self.free - known


@dataclass(frozen=True, slots=True)
class EngineStats:
    """`steps` counts by (mode, key, reason), `live_sizes` by what steps were asked for; warm-up and recording are not
    counted.

    `num_pending` keys are not recorded yet and may be, between steps. `capture_sizes` are uniform batches in requests,
    `mixed_capture_sizes` mixed ones in tokens. `startup_s` by part. `asleep` names what has been given back or must be
    written before anything can run.
    """

    steps: tuple[StepCount, ...]
    live_sizes: tuple[LiveCount, ...]
    num_recordings: int
    num_pending: int
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
    attention_backend: str
    device: str
    dtype: str
    kv_cache_dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    memory: MemoryStat
    num_checked: int
    recordings: tuple[RecordingStat, ...]
    startup_s: dict[str, float]
    asleep: tuple[str, ...]
    connector: ConnectorStats | None
