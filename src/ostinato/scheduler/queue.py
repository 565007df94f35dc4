"""Requests that wait for a row, best first: smaller priority value, then earlier arrival."""

from __future__ import annotations

import heapq

from ostinato.request import Request

__all__ = ["WaitingQueue", "order"]

_Entry = tuple[tuple[int, int], int, Request]  # order, serial number of the push (requests do not compare), request


def order(request: Request) -> tuple[int, int]:
    """Sort key of requests, best first. Arrivals differ, so no two requests compare equal."""
    return request.priority, request.arrival


class WaitingQueue:
    """A heap with removal by id: a removed entry stays in the heap, unlisted, until it surfaces or half are like it."""

    __slots__ = ("_heap", "_listed", "_num_pushed")

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._listed: dict[str, _Entry] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._listed)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._listed

    def push(self, request: Request) -> None:
        assert request.request_id not in self._listed, f"request {request.request_id} is already waiting"
        self._num_pushed += 1
        entry = (order(request), self._num_pushed, request)
        self._listed[request.request_id] = entry
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request:
        """The best request, which stays. IndexError when nothing waits."""
        while self._listed.get(self._heap[0][2].request_id) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> Request:
        """Take out the best request. IndexError when nothing waits."""
        request = self.peek()
        heapq.heappop(self._heap)
        del self._listed[request.request_id]
        return request

    def remove(self, request_id: str) -> Request | None:
        """Take out a request by id; None when it is not here."""
        entry = self._listed.pop(request_id, None)
        if len(self._heap) > 2 * len(self._listed):
            self._heap = list(self._listed.values())
            heapq.heapify(self._heap)
        return entry[2] if entry else None
