"""The producer's blocks, in memory that other processes may read. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import numpy as np

from ostinato.connectors.host_index import HostIndex
from ostinato.connectors.nixl import NixlMemory
from ostinato.connectors.store import Deliver
from ostinato.connectors.tcp import BlockServer
from ostinato.errors import ConfigError

__all__ = ["PublishedBlocks"]


class PublishedBlocks:
    """A BlockStore that is written here and read by others; the longest unused blocks go when it has `max_bytes`.

    `memory` [n * block_bytes] uint8 are its blocks, at places that do not change. The system gives it pages as they are
    written, unless a transport wants them before.
    """

    def __init__(self, max_bytes: int, block_bytes: int) -> None:
        """Raises ConfigError for more than the system promises."""
        self._block_bytes = block_bytes
        self._index = HostIndex(max_bytes // block_bytes)
        try:
            self.memory = np.empty(self._index.capacity * block_bytes, np.uint8)
        except MemoryError as error:
            raise ConfigError(
                f"max_bytes={max_bytes}: the system has not so much: {error}", field="max_bytes"
            ) from None
        self._lock = Lock()
        self.server: BlockServer | None = None
        self.shared: NixlMemory | None = None

    def get(self, digest: bytes) -> memoryview | None:
        """For the server; a use. The block stays as it is until `done`, once for each call that returned it."""
        with self._lock:
            slots = self._index.find([digest])
            self._index.hold(slots)
        return self._view(slots[0]) if slots else None

    def done(self, digest: bytes) -> None:
        with self._lock:
            self._index.release(self._index.find([digest]))  # it is still there: it was held

    def has(self, digest: bytes) -> bool:
        """A use too: the engine has just met a prompt with it."""
        with self._lock:
            return bool(self._index.find([digest]))

    def read(self, digests: Sequence[bytes], deliver: Deliver) -> None:
        """Others read it."""

    def write(self, digest: bytes, data: memoryview) -> bool:
        """False too if clients are reading every block there is room for."""
        if self.has(digest):
            return True
        with self._lock:
            slot = self._index.reserve()
        if slot is None:
            return False
        self._view(slot)[:] = data
        with self._lock:
            self._index.release([self._index.name(slot, digest)])
        if self.server is not None:
            self.server.block_added()
        return True

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        if self.shared is not None:
            self.shared.close()

    def _view(self, slot: int) -> memoryview:
        return self.memory[slot * self._block_bytes : (slot + 1) * self._block_bytes].data
