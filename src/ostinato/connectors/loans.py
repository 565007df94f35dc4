"""Blocks that a client reads by itself, where they lie: they must stay as they are until it says that it has them."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ostinato.connectors.wire import DONE, PLACE, Kind, block_checksum, receive_body, receive_head, send_frame
from ostinato.errors import ConnectorError

__all__ = ["MAX_LOANS", "Loans", "ReadableMemory"]

MAX_LOANS = 16
"""Blocks that one client may keep from being overwritten."""

_PAUSE_S = 100e-6


class ReadableMemory(Protocol):
    """Memory that clients can read without a thread of ours, as `nixl.NixlMemory`."""

    @property
    def metadata(self) -> bytes: ...

    def address(self, data: memoryview) -> int: ...

    def progress(self) -> None: ...


class Loans:
    """Those of one answer, in order. `done(digest)` is called once for each block that was lent: when the client has
    it, or at `close`, which is when the client is gone or has kept it for longer than `timeout_s`. A client that reads
    later than that, all the same, reads perhaps another block, which does not match the checksum that it was told.
    """

    def __init__(
        self,
        sock: socket.socket,
        request_id: int,
        memory: ReadableMemory,
        done: Callable[[bytes], None],
        timeout_s: float,
    ) -> None:
        self._sock, self._request_id, self._memory = sock, request_id, memory
        self._done, self._timeout_s = done, timeout_s
        self._open: deque[bytes] = deque()
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self.count = 0
        """Blocks that were lent so far."""

    def lend(self, digest: bytes, data: memoryview) -> None:
        """Say where the block lies. Raises ConnectorError and OSError."""
        self._open.append(digest)
        place = PLACE.pack(
            self._request_id, self.count, block_checksum(digest, data), self._memory.address(data), data.nbytes
        )
        send_frame(self._sock, Kind.PLACE, place, b"", self._timeout_s)
        self.count += 1
        self._memory.progress()

    def settle(self, at_most: int = 0) -> None:
        """Wait until the client has no more than `at_most` blocks still to read. Raises ConnectorError."""
        due = time.monotonic() + self._timeout_s
        while len(self._open) > at_most:
            if not self._poller.poll(0):
                if time.monotonic() > due:
                    raise ConnectorError(f"the client has stalled, with {len(self._open)} blocks still to read")
                self._memory.progress()
                time.sleep(_PAUSE_S)
                continue
            self._take_done(due)
            due = time.monotonic() + self._timeout_s

    def close(self) -> None:
        while self._open:
            self._done(self._open.popleft())

    def _take_done(self, due: float) -> None:
        _, length = receive_head(self._sock, {Kind.DONE: DONE.size}, due)
        if length != DONE.size:
            raise ConnectorError(f"DONE has {length} bytes, {DONE.size} were due")
        body = bytearray(length)
        receive_body(self._sock, memoryview(body), due)
        request_id, num_read = DONE.unpack(body)
        first = self.count - len(self._open)
        if request_id != self._request_id or not first < num_read <= self.count:
            raise ConnectorError(f"DONE says {num_read} of answer {request_id}, of {self.count} of {self._request_id}")
        for _ in range(num_read - first):
            self._done(self._open.popleft())
