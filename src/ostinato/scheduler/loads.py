"""Requests whose KV is on its way into their blocks beside the steps: they have blocks, and no row yet.

What copies may still write into is nobody else's, whatever has become of the request: its blocks are handed back here
once the load is reported.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.errors import OstinatoError
from ostinato.request import Request
from ostinato.scheduler.queue import order

__all__ = ["Loads"]


@dataclass(slots=True, eq=False)
class _Load:
    request: Request
    begun_s: float  # of `time.monotonic`
    ended: bool = False


class Loads:
    """As many as `len`, best first; and those whose requests have let go of them."""

    __slots__ = ("_dropped", "_loads")

    def __init__(self) -> None:
        self._loads: list[_Load] = []
        self._dropped: list[tuple[_Load, Sequence[int]]] = []

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def num_under_way(self) -> int:
        """Requests whose KV is not there yet."""
        return sum(not load.ended for load in self._loads)

    @property
    def any_under_way(self) -> bool:
        """Whether any copy may still write, for a request or for none."""
        return bool(self._dropped) or self.num_under_way > 0

    @property
    def dropped_tables(self) -> list[Sequence[int]]:
        return [block_ids for _, block_ids in self._dropped]

    def requests(self) -> list[Request]:
        """Best first."""
        return [load.request for load in self._loads]

    def ended(self) -> list[Request]:
        """Those that can go on, best first."""
        return [load.request for load in self._loads if load.ended]

    def is_dropped(self, request: Request) -> bool:
        """Whether a load that this request has let go of is under way: it cannot have another."""
        return any(request is load.request for load, _ in self._dropped)

    def under_way_since(self, begun_s: float) -> list[Request]:
        """Those whose loads have begun at this time of `time.monotonic` or before, and are not reported; also such as
        have let go of them."""
        loads = (*self._loads, *(load for load, _ in self._dropped))
        return [load.request for load in loads if not load.ended and load.begun_s <= begun_s]

    def begin(self, request: Request) -> None:
        insort(self._loads, _Load(request, time.monotonic()), key=lambda load: order(load.request))

    def end(self, request: Request) -> Sequence[int] | None:
        """The load is reported: None for a request that goes on with it, or else the blocks that it held until now.
        Raises OstinatoError for a request without a load."""
        for place, (load, block_ids) in enumerate(self._dropped):
            if load.request is request:
                del self._dropped[place]
                return block_ids
        if request not in self.requests():
            raise OstinatoError(f"the connector has loaded for request {request.request_id!r}, which has no load")
        self._find(request).ended = True
        return None

    def admit(self, request: Request) -> None:
        """The request has its row."""
        self._loads.remove(self._find(request))

    def drop(self, request: Request, block_ids: Sequence[int]) -> bool:
        """The request gives its blocks up. False: at once, nothing writes into them; True: they are kept until then."""
        load = self._find(request)
        self._loads.remove(load)
        if not load.ended:
            self._dropped.append((load, block_ids))
        return not load.ended

    def _find(self, request: Request) -> _Load:
        return next(load for load in self._loads if load.request is request)
