"""Threads that read blocks from a store into host memory, while the engine goes on. No torch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from ostinato.connectors.host_index import HostIndex
from ostinato.connectors.store import BlockStore
from ostinato.errors import ConnectorError

__all__ = ["Fetch", "Fetcher"]

logger = logging.getLogger("ostinato")

_JOIN_S = 5.0  # a disk that hangs must not keep the process alive


class Fetch:
    """The blocks that one request waits for. `slots` [n], each held once, are those that have come."""

    def __init__(self, digests: Sequence[bytes]) -> None:
        self.digests = list(digests)
        self.slots: list[int] = []
        self.done = False  # nothing more will come
        self.dropped = False  # nobody waits any more
        self.begun_s = time.monotonic()


class Fetcher:
    """`lock` guards `index` and all fetches. `put(slot, data)` fills a slot with `block_bytes` bytes."""

    def __init__(
        self,
        store: BlockStore,
        index: HostIndex,
        lock: threading.Lock,
        put: Callable[[int, memoryview], None],
        *,
        block_bytes: int,
        num_threads: int,
    ) -> None:
        self._store, self._index, self._lock, self._put = store, index, lock, put
        self._block_bytes = block_bytes
        self._jobs: SimpleQueue[Fetch | None] = SimpleQueue()
        self._changed = threading.Event()
        self._closing = False
        self.num_failures = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"ostinato-kv-read-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, digests: Sequence[bytes]) -> Fetch:
        """As many of them, from the first on, as the store has and host memory has room for."""
        fetch = Fetch(digests)
        self._jobs.put(fetch)
        return fetch

    def drop(self, fetch: Fetch) -> None:
        """What has come is held for it no longer, and what comes yet is not kept."""
        with self._lock:
            fetch.dropped = True
            self._index.release(fetch.slots)
            fetch.slots = []

    def wait(self, timeout_s: float) -> None:
        """Until a fetch has ended since the last call, or for so long."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def close(self) -> None:
        """After the store's `close`, which ends what waits in it."""
        self._closing = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _run(self) -> None:
        while (fetch := self._jobs.get()) is not None:
            try:
                if not fetch.dropped and not self._closing:
                    self._store.read(fetch.digests, lambda data, fetch=fetch: self._deliver(fetch, data))  # type: ignore[misc]
            except Exception as error:
                if not self._closing:
                    with self._lock:
                        self.num_failures += 1
                    expected = isinstance(error, ConnectorError | OSError)
                    logger.warning(
                        "KV blocks: %d of %d came, the rest is computed: %s",
                        len(fetch.slots),
                        len(fetch.digests),
                        error if expected else repr(error),
                        exc_info=not expected,
                    )
            fetch.done = True
            self._changed.set()

    def _deliver(self, fetch: Fetch, data: memoryview | bytes) -> bool:
        view = memoryview(data).cast("B")
        if view.nbytes != self._block_bytes:
            raise ConnectorError(f"a block of {view.nbytes} bytes came, one here has {self._block_bytes}")
        digest = fetch.digests[len(fetch.slots)]
        with self._lock:
            if fetch.dropped or self._closing:
                return False
            found = self._index.find([digest])  # another request's, come meanwhile
            if found:
                self._index.hold(found)
                fetch.slots += found
                return True
            slot = self._index.reserve()
        if slot is None:
            return False
        self._put(slot, view)
        with self._lock:
            if fetch.dropped:
                self._index.release([slot])
                return False
            fetch.slots.append(self._index.name(slot, digest))
            return True
