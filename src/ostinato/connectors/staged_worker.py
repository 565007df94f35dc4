"""Connectors over a `BlockStore`: the worker's side, and how both are made.

A block goes from the pool to host memory beside the steps, and from there to the store on a thread of its own. The step
after a save is held up only by the copy to host memory, if it overwrites the block.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from ostinato.connectors.fetcher import Fetcher
from ostinato.connectors.host_index import HostIndex
from ostinato.connectors.mover import BlockMover, HostBlocks
from ostinato.connectors.protocol import KVConnector, Wait
from ostinato.connectors.staged import StagedScheduler, StagedTransfers, Written
from ostinato.connectors.store import BlockStore
from ostinato.kv.storage import KVStorage

if TYPE_CHECKING:
    from ostinato.connectors.registry import ConnectorContext

__all__ = ["STAGED_OPTIONS", "StagedWorker", "connector_over"]

logger = logging.getLogger("ostinato")

STAGED_OPTIONS = {"cpu_bytes_to_use", "wait", "load", "io_threads", "load_timeout_s"}
"""Options of every connector over a store; each adds its own."""


class _Job(NamedTuple):
    wait_for_saves: Callable[[], None]
    meta: StagedTransfers


class StagedWorker(BlockMover):
    """Hands what was saved on to `store`, on one thread."""

    def __init__(self, storage: KVStorage, host: HostBlocks, wait: Wait, store: BlockStore) -> None:
        super().__init__(storage, host, wait)
        self._view, self._store = host.view, store
        self._next_number = 0
        self._writes: SimpleQueue[_Job | None] = SimpleQueue()
        self._written: SimpleQueue[object] = SimpleQueue()
        self._writer = threading.Thread(target=self._run, name="ostinato-kv-write", daemon=True)
        self._writer.start()

    def start_load_kv(self, meta: object | None) -> None:
        if meta is None:
            self.begin(None)
            return
        assert isinstance(meta, StagedTransfers)
        for skipped in range(self._next_number, meta.number):  # of steps that failed before they came here
            self._give_up(skipped)
        self._next_number = meta.number + 1
        try:
            wait_for_saves = self.begin(meta)
        except BaseException:
            self._give_up(meta.number)
            raise
        if meta.saves:
            self._writes.put(_Job(wait_for_saves, meta))

    def get_finished(self) -> Sequence[object]:
        finished = list(super().get_finished())
        try:
            while True:
                finished.append(self._written.get_nowait())
        except Empty:
            return finished

    def close(self) -> None:
        """What is on its way to the store still goes there."""
        super().close()
        self._writes.put(None)
        self._writer.join()

    def _give_up(self, number: int) -> None:
        self._written.put(number)
        self._written.put(Written(number))

    def _run(self) -> None:
        while (job := self._writes.get()) is not None:
            number, kept = job.meta.number, []
            try:
                job.wait_for_saves()
                for copy, digest in zip(job.meta.saves, job.meta.digests, strict=True):
                    kept.append(self._write(digest, copy.host))
            except Exception:
                logger.exception("%d KV blocks could not be saved", len(job.meta.saves) - len(kept))
                kept += [False] * (len(job.meta.saves) - len(kept))
            self._written.put(Written(number, tuple(kept)))

    def _write(self, digest: bytes, slot: int) -> bool:
        try:
            return self._store.write(digest, self._view(slot))
        except Exception:
            logger.exception("KV block %s could not be saved", digest.hex())
            return False


def connector_over(
    store: BlockStore,
    context: ConnectorContext,
    *,
    has: Callable[[bytes], bool] | None = None,
    reads: bool = True,
    writes: bool = True,
    default_bytes: int = 1 << 30,
    fetched: Callable[[], Mapping[str, int]] | None = None,
) -> KVConnector:
    """Both sides of a connector that keeps blocks in `store`, which it owns from now on.

    `has(digest)` tells, at once, whether the store has a block as far as it knows; `fetched()` how many blocks came, by
    transport. Options in `context.extra`
    (STAGED_OPTIONS): `cpu_bytes_to_use`, host memory on the way; `wait`; `load`; `io_threads`, reads at once;
    `load_timeout_s`, after which a request computes what has not come. Raises ConfigError for one of them, and closes
    the store then.
    """
    try:
        block_bytes = context.block_bytes
        capacity = max(1, context.whole("cpu_bytes_to_use", default_bytes) // block_bytes)
        num_threads = context.whole("io_threads", 4)
        load_timeout_s, load_kv_async = context.seconds("load_timeout_s", 30.0), context.load_kv_async()
        host = HostBlocks(context.storage, capacity)
        contents = context.model()
        worker = StagedWorker(context.storage, host, context.wait(), store)
    except BaseException:
        store.close()
        raise
    index, lock = HostIndex(capacity), threading.Lock()

    def put(slot: int, data: memoryview) -> None:
        host.view(slot)[:] = data

    fetcher = Fetcher(store, index, lock, put, block_bytes=block_bytes, num_threads=num_threads) if reads else None
    scheduler = StagedScheduler(
        block_size=context.block_size,
        index=index,
        lock=lock,
        fetcher=fetcher,
        writes=writes,
        has=has,
        load_timeout_s=load_timeout_s,
        close=store.close,
        contents=contents,
        load_kv_async=load_kv_async,
        fetched=fetched,
    )
    return KVConnector(scheduler, worker)
