"""Recording as a phase: warm up everything, collect garbage once, record everything, seal."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ostinato.graphs.dispatch import BatchKey
from ostinato.graphs.mode import RuntimeMode
from ostinato.graphs.recorder import Cut, Recorder, Recording, no_cut
from ostinato.graphs.store import GraphStore

__all__ = ["CaptureSummary", "record_all", "record_one"]

Step = Callable[[RuntimeMode, BatchKey, Cut], None]
"""`step(mode, key, cut)`: one step at the size of `key`, over padding."""


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """What the phase cost. `bytes` are those retained by the new recordings."""

    num_recordings: int
    warm_up_s: float
    record_s: float
    bytes: int


def record_all(
    store: GraphStore,
    recorder: Recorder,
    keys: Sequence[tuple[RuntimeMode, BatchKey]],
    *,
    step: Step,
    cuts: Mapping[RuntimeMode, frozenset[str]],
    prepare: Callable[[RuntimeMode, BatchKey], None] | None = None,
    warm: Step | None = None,
    warm_up: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
    collect_garbage: bool = True,
) -> CaptureSummary:
    """Records every key, PIECEWISE before FULL and the largest first, and seals the store.

    The largest comes first because later recordings then fit into the memory it retains. Each key is run once eagerly
    before any is recorded if `warm_up` says so (None: if the backend needs it): with `warm` where it is given, which
    has to launch every kernel that `step` does, if not as often. `prepare(mode, key)` is called before each run, and
    `progress(done, total)` after each recording. `collect_garbage` frees what it can first, which takes a process of
    this size some tenths of a second. Raises CaptureError as `GraphStore.require_open` and
    `Recorder.record` do; what was recorded before stays, and the store stays open.
    """
    for mode, key in keys:
        store.require_open(mode, key)
    largest_first = sorted(keys, key=lambda pair: pair[1], reverse=True)
    ordered = sorted(largest_first, key=lambda pair: pair[0] is RuntimeMode.FULL)
    backend, started = recorder.backend, time.perf_counter()
    if backend.needs_warm_up if warm_up is None else warm_up:
        with backend.warm_up_context():
            for mode, key in ordered:
                if prepare is not None:
                    prepare(mode, key)
                (warm or step)(mode, key, no_cut)
    backend.synchronize()
    warmed, retained = time.perf_counter(), 0
    with _collector_off(collect_garbage):
        for done, (mode, key) in enumerate(ordered, start=1):
            retained += record_one(store, recorder, mode, key, step=step, cuts=cuts, prepare=prepare).bytes
            if progress is not None:
                progress(done, len(ordered))
    store.seal()
    return CaptureSummary(len(ordered), warmed - started, time.perf_counter() - warmed, retained)


def record_one(
    store: GraphStore,
    recorder: Recorder,
    mode: RuntimeMode,
    key: BatchKey,
    *,
    step: Step,
    cuts: Mapping[RuntimeMode, frozenset[str]],
    prepare: Callable[[RuntimeMode, BatchKey], None] | None = None,
) -> Recording:
    """Records one key into an open store. Raises CaptureError as `record_all` does."""
    store.require_open(mode, key)
    if prepare is not None:
        prepare(mode, key)
    recording = recorder.record(lambda cut: step(mode, key, cut), cuts.get(mode, frozenset()))
    store.add(mode, key, recording)
    return recording


@contextmanager
def _collector_off(collect_first: bool) -> Iterator[None]:
    """Keeps the collector from running: what it frees could be memory that a recording is using."""
    if collect_first:
        gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
