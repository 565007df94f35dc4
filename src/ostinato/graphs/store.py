"""All recordings of an engine, by (mode, key). Filled once, then sealed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ostinato.errors import CaptureError
from ostinato.graphs.dispatch import BatchKey
from ostinato.graphs.mode import RuntimeMode
from ostinato.graphs.recorder import Recording
from ostinato.graphs.statics import Statics

__all__ = ["GraphStore", "StoredRecording"]


@dataclass(frozen=True, slots=True)
class StoredRecording:
    """One line of the table of recordings."""

    mode: RuntimeMode
    key: BatchKey
    num_graphs: int
    num_nodes: int
    bytes: int
    capture_s: float


class GraphStore:
    """Keeps recordings, and with them everything they read, until all are dropped as one set.

    Before the first replay of each recording the addresses of all static tensors are compared with those recorded;
    `recheck` makes the next replay of each compare again.
    """

    def __init__(self, statics: Statics) -> None:
        self._statics = statics
        self._recordings: dict[tuple[RuntimeMode, BatchKey], Recording] = {}
        self._verified: set[tuple[RuntimeMode, BatchKey]] = set()
        self._sealed = False

    # -- filling -----------------------------------------------------------------------------------------------------

    def require_open(self, mode: RuntimeMode, key: BatchKey) -> None:
        """Raises CaptureError when (mode, key) may not be recorded: the store is sealed, or has it."""
        if self._sealed:
            raise CaptureError(
                f"{mode} {key} would be recorded after recording has ended: a capture while serving stalls every "
                "request. Name its size before start-up, or record it deliberately inside store.unsealed()"
            )
        if (mode, key) in self._recordings:
            raise CaptureError(f"{mode} {key} is recorded already: clear() the store to record again")

    def add(self, mode: RuntimeMode, key: BatchKey, recording: Recording) -> None:
        self.require_open(mode, key)
        self._recordings[mode, key] = recording

    def seal(self) -> None:
        """Ends recording: from now on `add` raises CaptureError."""
        self._sealed = True

    @property
    def sealed(self) -> bool:
        return self._sealed

    @contextmanager
    def unsealed(self) -> Iterator[None]:
        """Opens the store for deliberate recording, between steps; afterwards it is as sealed as it was."""
        was_sealed, self._sealed = self._sealed, False
        try:
            yield
        finally:
            self._sealed = was_sealed

    def drop(self, indices: Iterable[tuple[RuntimeMode, BatchKey]]) -> int:
        """Drops these, as far as they are recorded; returns how many were. None may be running."""
        found = [index for index in indices if self._recordings.pop(index, None) is not None]
        self._verified.difference_update(found)
        return len(found)

    def clear(self) -> None:
        """Drops all recordings at once and opens the store. None may be running."""
        self._recordings.clear()
        self._verified.clear()
        self._sealed = False

    # -- use ---------------------------------------------------------------------------------------------------------

    def get(self, mode: RuntimeMode, key: BatchKey) -> Recording:
        """The recording of (mode, key). Raises CaptureError if there is none."""
        recording = self._recordings.get((mode, key))
        if recording is None:
            raise CaptureError(
                f"{mode} {key} is not recorded: record it first, or let the dispatcher choose among available()"
            )
        return recording

    def replay(self, mode: RuntimeMode, key: BatchKey) -> None:
        """Replays it. Raises StaleGraphError if a static tensor is not where it was."""
        recording = self.get(mode, key)
        if (mode, key) not in self._verified:
            self._statics.verify(recording.addresses)
            self._verified.add((mode, key))
        recording.replay()

    def recheck(self) -> None:
        """Compares all addresses again at each key's next replay. For whoever may have replaced a static tensor."""
        self._verified.clear()

    def available(self) -> Collection[tuple[RuntimeMode, BatchKey]]:
        """What is recorded, as `Dispatcher.pick` takes it; a live view."""
        return self._recordings.keys()

    def __contains__(self, index: tuple[RuntimeMode, BatchKey]) -> bool:
        return index in self._recordings

    # -- totals ------------------------------------------------------------------------------------------------------

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    @property
    def bytes(self) -> int:
        """What all recordings retain on the device."""
        return sum(recording.bytes for recording in self._recordings.values())

    @property
    def seconds(self) -> float:
        """Time spent recording."""
        return sum(recording.capture_s for recording in self._recordings.values())

    def table(self) -> tuple[StoredRecording, ...]:
        """One line per recording, in recording order."""
        return tuple(
            StoredRecording(mode, key, recording.num_graphs, recording.num_nodes, recording.bytes, recording.capture_s)
            for (mode, key), recording in self._recordings.items()
        )
