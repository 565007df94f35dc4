"""`OffloadingConnector`: host memory as a second place for the prefix cache.

A block that the pool's prefix cache would forget is copied to host memory first, and comes back when a prompt begins
with its content. No torch on the scheduler's side.
"""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.connectors.host_index import HostIndex
from ostinato.connectors.mover import Copy, Loaded, Transfers
from ostinato.connectors.offer import Offer
from ostinato.connectors.protocol import ConnectorStats, LoadedKV
from ostinato.request import Request

__all__ = ["OffloadingScheduler"]


class OffloadingScheduler:
    """`capacity` blocks of `block_size` tokens. `load_kv_async`: as `get_num_new_matched_tokens` is to answer."""

    def __init__(self, capacity: int, block_size: int, load_kv_async: bool | None = None) -> None:
        self._block_size, self._load_kv_async = block_size, load_kv_async
        self._index = HostIndex(capacity)
        self._offer = Offer(self._index, block_size)
        self._saves: list[Copy] = []
        self._under_way: dict[int, list[int]] = {}  # by transfer: the slots that it holds
        self._number = self._saved = 0

    def get_num_new_matched_tokens(
        self, request: Request, block_hashes: Sequence[bytes], num_computed_tokens: int
    ) -> tuple[int, bool | None]:
        found = self._offer.match(block_hashes[num_computed_tokens // self._block_size :])
        return found * self._block_size, self._load_kv_async

    def update_state_after_alloc(
        self,
        request: Request,
        block_ids: Sequence[int],
        num_computed_tokens: int,
        num_external_tokens: int,
        load_kv_async: bool = False,
    ) -> None:
        saves: list[Copy] = []
        if load_kv_async:  # what makes room for the load goes with it: no step has to wait for that either
            mine = set(block_ids)
            saves = [copy for copy in self._saves if copy.block_id in mine]
            self._saves = [copy for copy in self._saves if copy.block_id not in mine]
        self._offer.accept(request, block_ids, num_computed_tokens, num_external_tokens, load_kv_async, saves)

    def blocks_computed(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """They are saved when the pool needs their room."""

    def block_evicted(self, block_id: int, block_hash: bytes) -> None:
        slot = self._index.add(block_hash)
        if slot is not None:
            self._index.hold([slot])
            self._saves.append(Copy(slot, block_id))
            self._saved += 1

    def build_connector_meta(self) -> Transfers | None:
        self._offer.withdraw()
        if not self._saves and not self._offer.has_loads:
            return None
        meta = Transfers(self._number, tuple(self._saves), self._offer.take_loads(), self._offer.take_async_loads())
        self._under_way[self._number] = [copy.host for copy in (*meta.saves, *meta.loads)]
        self._number += 1
        self._saves = []
        return meta

    def update_connector_output(self, finished: Sequence[object]) -> None:
        for item in finished:
            if isinstance(item, Loaded):
                self._offer.end(item)
            else:
                assert isinstance(item, int)
                self._index.release(self._under_way.pop(item, ()))

    def step_dropped(self, meta: object) -> None:
        """What it was to save may not be here: rather than find out, nothing is."""
        assert isinstance(meta, Transfers)
        self._index.clear()
        self._offer.fail(meta.async_loads)
        self.update_connector_output([meta.number])

    def get_finished_recving(self) -> list[LoadedKV]:
        return self._offer.take_received()

    def request_finished(self, request: Request) -> None:
        """What was loaded for it is in the pool, and what was not stays here."""

    def forget_contents(self) -> None:
        self._offer.withdraw()
        self._index.clear()

    def wait_for_change(self, timeout_s: float) -> None:
        """A match is always known at once."""

    def stats(self) -> ConnectorStats:
        return ConnectorStats(
            query_tokens=self._offer.query_tokens,
            hit_tokens=self._offer.hit_tokens,
            loaded_blocks=self._offer.loaded_blocks,
            saved_blocks=self._saved,
            held_blocks=len(self._index),
            capacity_blocks=self._index.capacity,
            failed_loads=self._offer.num_failed,
            async_loads=self._offer.num_async,
        )

    def close(self) -> None:
        self._index.clear()
