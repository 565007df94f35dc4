"""Connectors over a `BlockStore`, through host memory: the scheduler's side. No torch.

Blocks are saved when they are complete, so that what a process has computed outlives it, and not only what its pool had
no more room for. A prompt that the pool does not know waits while a thread asks the store for its blocks; others go
first. What has come is loaded as from any host memory (`mover`); what has not is computed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from ostinato.connectors.fetcher import Fetch, Fetcher
from ostinato.connectors.host_index import HostIndex
from ostinato.connectors.mover import Copy, Loaded, Transfers
from ostinato.connectors.offer import Offer
from ostinato.connectors.protocol import ConnectorStats, LoadedKV, Matched
from ostinato.request import Request

__all__ = ["StagedScheduler", "StagedTransfers", "Written"]


@dataclass(frozen=True, slots=True)
class StagedTransfers(Transfers):
    """`digests` are those of `saves`, which go on to the store."""

    digests: tuple[bytes, ...] = ()


class Written(NamedTuple):
    """The saves of transfer `number` need their slots no more; the store has taken those of which `kept` is true."""

    number: int
    kept: tuple[bool, ...] = ()


class StagedScheduler:
    """`lock` guards `index`, which `fetcher` uses too. Without a fetcher nothing is read, without `writes` nothing
    saved.

    `has(digest)` says whether the store has a block, as far as it knows without looking: those are not saved again. A
    request waits for `load_timeout_s` at most. `load_kv_async`: as `get_num_new_matched_tokens` is to answer. `fetched`
    counts blocks for `ConnectorStats.fetched_blocks`. `close` closes the store.

    `contents` names what KV is of at the start, which the store's own namespace covers. Under other weights the store
    and host memory know blocks by other digests, so that what is on its way when the weights change is not mistaken
    either.
    """

    def __init__(
        self,
        *,
        block_size: int,
        index: HostIndex,
        lock: threading.Lock,
        fetcher: Fetcher | None,
        writes: bool,
        has: Callable[[bytes], bool] | None,
        load_timeout_s: float,
        close: Callable[[], None],
        contents: str,
        load_kv_async: bool | None = None,
        fetched: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        self._block_size, self._index, self._lock = block_size, index, lock
        self._load_kv_async, self._fetched = load_kv_async, fetched
        self._fetcher, self._load_timeout_s, self._close = fetcher, load_timeout_s, close
        self._reads, self._writes, self._has = fetcher is not None, writes, has
        self._may_write, self._first_contents, self._salt = writes, contents, b""
        self._fetches: dict[str, Fetch] = {}  # by request
        self._waiting: set[str] = set()  # requests, for a fetch of theirs or another's
        self._hashes: Sequence[bytes] = ()  # of the request that was asked about last
        self._offer = Offer(index, block_size, lock)
        self._saves: list[tuple[Copy, bytes]] = []
        self._saving: set[bytes] = set()
        self._unsaved: set[bytes] = set()  # in the pool, and there was no room to save them: once more when they go
        self._loading: dict[int, list[int]] = {}  # by transfer: the slots that it holds
        self._writing: dict[int, list[tuple[int, bytes]]] = {}
        self._number = self._saved = 0
        self._deferred = self._late = self._failed_saves = 0

    def get_num_new_matched_tokens(
        self, request: Request, block_hashes: Sequence[bytes], num_computed_tokens: int
    ) -> Matched:
        self._offer.withdraw()
        self._hashes = block_hashes
        if self._fetcher is None or not self._reads:
            return 0
        wanted = self._names(block_hashes[num_computed_tokens // self._block_size :])
        found = self._offer.match(wanted)
        if found < len(wanted) and not self._has_asked(self._fetcher, request, wanted[found:]):
            self._offer.withdraw()
            return None
        return found * self._block_size, self._load_kv_async

    def update_state_after_alloc(
        self,
        request: Request,
        block_ids: Sequence[int],
        num_computed_tokens: int,
        num_external_tokens: int,
        load_kv_async: bool = False,
    ) -> None:
        self._offer.accept(request, block_ids, num_computed_tokens, num_external_tokens, load_kv_async)
        self._drop_fetch(request)
        if self._has is not None:  # what the store has forgotten since, while the pool still has it
            computed = block_ids[: num_computed_tokens // self._block_size]
            self.blocks_computed(list(zip(computed, self._hashes, strict=False)))

    def blocks_computed(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        if self._writes:
            digests = self._names([digest for _, digest in blocks])
            for (block_id, _), digest in zip(blocks, digests, strict=True):
                if digest not in self._saving and not self._is_stored(digest):
                    self._save(block_id, digest)

    def block_evicted(self, block_id: int, block_hash: bytes) -> None:
        if not self._unsaved:
            return
        (digest,) = self._names([block_hash])
        if digest in self._unsaved:
            self._save(block_id, digest)
            self._unsaved.discard(digest)

    def build_connector_meta(self) -> StagedTransfers | None:
        self._offer.withdraw()
        if not self._saves and not self._offer.has_loads:
            return None
        saves, digests = tuple(copy for copy, _ in self._saves), tuple(digest for _, digest in self._saves)
        meta = StagedTransfers(self._number, saves, self._offer.take_loads(), self._offer.take_async_loads(), digests)
        self._loading[meta.number] = [copy.host for copy in meta.loads]
        if saves:
            self._writing[meta.number] = [(copy.host, digest) for copy, digest in self._saves]
        self._number += 1
        self._saves = []
        return meta

    def update_connector_output(self, finished: Sequence[object]) -> None:
        for item in finished:
            if isinstance(item, Loaded):
                self._offer.end(item)
                continue
            with self._lock:
                if isinstance(item, Written):
                    self._take_written(item)
                else:
                    assert isinstance(item, int)
                    self._index.release(self._loading.pop(item, ()))

    def step_dropped(self, meta: object) -> None:
        """The worker's side tells of every transfer, of those that never began too; not of asynchronous loads."""
        assert isinstance(meta, StagedTransfers)
        self._offer.fail(meta.async_loads)

    def get_finished_recving(self) -> list[LoadedKV]:
        return self._offer.take_received()

    def request_finished(self, request: Request) -> None:
        self._drop_fetch(request)

    def forget_contents(self) -> None:
        """Nothing is read or written until it is known what KV is of."""
        self._offer.withdraw()
        self._reads = self._writes = False
        if self._fetcher is not None:
            for fetch in self._fetches.values():
                self._fetcher.drop(fetch)
        self._fetches.clear()
        with self._lock:
            self._index.release([copy.host for copy, _ in self._saves])
            self._index.clear()
        self._saves = []
        self._saving.clear()
        self._unsaved.clear()

    def set_contents(self, name: str) -> None:
        self._salt = b"" if name == self._first_contents else blake2b(name.encode(), digest_size=32).digest()
        self._reads, self._writes = self._fetcher is not None, self._may_write

    def wait_for_change(self, timeout_s: float) -> None:
        if self._fetcher is not None:
            self._fetcher.wait(timeout_s)

    def stats(self) -> ConnectorStats:
        return ConnectorStats(
            query_tokens=self._offer.query_tokens,
            hit_tokens=self._offer.hit_tokens,
            loaded_blocks=self._offer.loaded_blocks,
            saved_blocks=self._saved,
            held_blocks=len(self._index),
            capacity_blocks=self._index.capacity,
            deferred_requests=self._deferred,
            failed_loads=self._late
            + self._offer.num_failed
            + (0 if self._fetcher is None else self._fetcher.num_failures),
            failed_saves=self._failed_saves,
            pending_saves=len(self._saving),
            async_loads=self._offer.num_async,
            fetched_blocks={} if self._fetched is None else self._fetched(),
        )

    def close(self) -> None:
        self._reads = self._writes = False
        self._close()
        if self._fetcher is not None:
            self._fetcher.close()

    def _has_asked(self, fetcher: Fetcher, request: Request, missing: Sequence[bytes]) -> bool:
        """Whether the store has been asked for these blocks and has given what it will."""
        fetch = self._fetches.get(request.request_id)
        if fetch is None:
            self._deferred += request.request_id not in self._waiting
            self._waiting.add(request.request_id)
            others = [other for other in self._fetches.values() if not other.done and not other.dropped]
            if not any(missing[0] in other.digests for other in others):  # else it comes for another request already
                self._fetches[request.request_id] = fetcher.begin(missing)
            return False
        if fetch.done or fetch.dropped:
            return True
        if time.monotonic() - fetch.begun_s < self._load_timeout_s:
            return False
        self._late += 1
        fetcher.drop(fetch)
        return True

    def _names(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """By which the store and host memory know blocks of these digests, computed with the present weights."""
        if not self._salt:
            return digests
        return [
            blake2b(digest, digest_size=32, person=b"ostinato-weights", key=self._salt).digest() for digest in digests
        ]

    def _drop_fetch(self, request: Request) -> None:
        self._waiting.discard(request.request_id)
        fetch = self._fetches.pop(request.request_id, None)
        if fetch is not None and self._fetcher is not None:
            self._fetcher.drop(fetch)

    def _is_stored(self, digest: bytes) -> bool:
        with self._lock:
            here = bool(self._index.find([digest]))
        return here if self._has is None else self._has(digest)

    def _save(self, block_id: int, digest: bytes) -> None:
        """Into a slot that is not found before the store has it: its content is not there yet."""
        with self._lock:
            slot = self._index.reserve()
        if slot is None:
            self._failed_saves += 1
            self._unsaved.add(digest)
        else:
            self._saves.append((Copy(slot, block_id), digest))
            self._saving.add(digest)

    def _take_written(self, item: Written) -> None:
        held = self._writing.pop(item.number, [])
        for (slot, digest), kept in zip(held, item.kept or (False,) * len(held), strict=True):
            self._saving.discard(digest)
            self._saved += kept
            self._failed_saves += not kept
            named = self._index.name(slot, digest) if kept and self._writes else slot
            self._index.release([named])
