"""From a match in host memory to the copies that a step makes of it: what connectors over host memory share. No torch
of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

from ostinato.connectors.host_index import HostIndex
from ostinato.connectors.mover import Copy
from ostinato.request import Request

__all__ = ["Offer"]


class Offer:
    """Slots that a match found. They are held until the request has blocks, or is left for later; those that are to be
    loaded are held once more, for the transfer. `lock` guards `index`, where threads use it too.
    """

    def __init__(self, index: HostIndex, block_size: int, lock: AbstractContextManager[object] | None = None) -> None:
        self._index, self._block_size = index, block_size
        self._lock = lock or contextlib.nullcontext()
        self._slots: list[int] = []
        self.loads: list[Copy] = []  # for the step that is being planned
        self.query_tokens = self.hit_tokens = self.loaded_blocks = 0

    def match(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these, from the first on, are there. They are held in place of what was offered before."""
        self.withdraw()
        with self._lock:
            self._slots = self._index.find(block_hashes)
            self._index.hold(self._slots)
        return len(self._slots)

    def accept(
        self, request: Request, block_ids: Sequence[int], num_computed_tokens: int, num_external_tokens: int
    ) -> None:
        """The arguments of `update_state_after_alloc`."""
        first, count = num_computed_tokens // self._block_size, num_external_tokens // self._block_size
        self.query_tokens += len(request.tokens) - num_computed_tokens
        self.hit_tokens += num_external_tokens
        self.loaded_blocks += count
        slots = self._slots[:count]
        self.loads += [Copy(slot, block) for slot, block in zip(slots, block_ids[first:], strict=False)]
        with self._lock:
            self._index.hold(slots)
        self.withdraw()

    def take_loads(self) -> tuple[Copy, ...]:
        """What the step loads; its transfer holds these slots from now on."""
        loads, self.loads = tuple(self.loads), []
        return loads

    def withdraw(self) -> None:
        slots, self._slots = self._slots, []
        with self._lock:
            self._index.release(slots)
