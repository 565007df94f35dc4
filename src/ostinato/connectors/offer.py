"""From a match in host memory to the copies that are made of it, by a step or beside steps: what connectors over host
memory share. No torch of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ostinato.connectors.host_index import HostIndex
from ostinato.connectors.mover import AsyncLoad, Copy, Loaded
from ostinato.connectors.protocol import LoadedKV
from ostinato.request import Request

__all__ = ["Offer"]


@dataclass(slots=True)
class _Receiving:
    """An asynchronous load, from its planning until the worker's side has reported it. It holds `slots`."""

    request: Request
    slots: list[int]
    num_tokens: int


class Offer:
    """Slots that a match found. They are held until the request has blocks, or is left for later; those that are to be
    loaded are held once more, for the transfer. `lock` guards `index`, where threads use it too.
    """

    def __init__(self, index: HostIndex, block_size: int, lock: AbstractContextManager[object] | None = None) -> None:
        self._index, self._block_size = index, block_size
        self._lock = lock or contextlib.nullcontext()
        self._slots: list[int] = []
        self.loads: list[Copy] = []  # for the step that is being planned
        self._async_loads: list[AsyncLoad] = []  # to begin with the next transfers
        self._receiving: dict[int, _Receiving] = {}  # by number of the load
        self._received: list[LoadedKV] = []
        self.query_tokens = self.hit_tokens = self.loaded_blocks = self.num_async = self.num_failed = 0

    def match(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these, from the first on, are there. They are held in place of what was offered before."""
        self.withdraw()
        with self._lock:
            self._slots = self._index.find(block_hashes)
            self._index.hold(self._slots)
        return len(self._slots)

    def accept(
        self,
        request: Request,
        block_ids: Sequence[int],
        num_computed_tokens: int,
        num_external_tokens: int,
        load_kv_async: bool,
        saves: Sequence[Copy] = (),
    ) -> None:
        """The arguments of `update_state_after_alloc`, and for an asynchronous load, saves of the request's blocks that
        go with it: their slots, held once, are its own from now on."""
        first, count = num_computed_tokens // self._block_size, num_external_tokens // self._block_size
        self.query_tokens += len(request.tokens) - num_computed_tokens
        self.hit_tokens += num_external_tokens
        self.loaded_blocks += count
        slots = self._slots[:count]
        copies = [Copy(slot, block) for slot, block in zip(slots, block_ids[first:], strict=False)]
        if load_kv_async:
            self._async_loads.append(AsyncLoad(self.num_async, tuple(copies), tuple(saves)))
            held = [*slots, *(copy.host for copy in saves)]
            self._receiving[self.num_async] = _Receiving(request, held, num_external_tokens)
            self.num_async += 1
        else:
            self.loads += copies
        with self._lock:
            self._index.hold(slots)
        self.withdraw()

    def take_loads(self) -> tuple[Copy, ...]:
        """What the step loads; its transfer holds these slots from now on."""
        loads, self.loads = tuple(self.loads), []
        return loads

    @property
    def has_loads(self) -> bool:
        return bool(self.loads or self._async_loads)

    def take_async_loads(self) -> tuple[AsyncLoad, ...]:
        """What begins with the next transfers. Its slots are held until `end`."""
        loads, self._async_loads = tuple(self._async_loads), []
        return loads

    def fail(self, loads: Sequence[AsyncLoad]) -> None:
        """They were to begin with a step that was not launched. Whether they did is unknown, and so is what is in their
        slots, which the same step was perhaps to save. They count for nothing, and are reported once the worker's side
        has come past them."""
        for load in loads:
            if load.number in self._receiving:
                self._receiving[load.number].num_tokens = 0
                self._async_loads.append(AsyncLoad(load.number, ()))

    def end(self, loaded: Loaded) -> None:
        """What the worker's side has reported; the lock is not held. A load that was begun twice is reported twice."""
        receiving = self._receiving.pop(loaded.number, None)
        if receiving is None:
            return
        with self._lock:
            self._index.release(receiving.slots)
        num_tokens = receiving.num_tokens if loaded.succeeded else 0
        self.num_failed += num_tokens == 0
        self._received.append(LoadedKV(receiving.request, num_tokens))

    def take_received(self) -> list[LoadedKV]:
        received, self._received = self._received, []
        return received

    def withdraw(self) -> None:
        slots, self._slots = self._slots, []
        with self._lock:
            self._index.release(slots)
