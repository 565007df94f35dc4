"""The end that fetches blocks."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ostinato.connectors.wire import (
    BLOCK,
    END,
    MAX_DIGESTS,
    MAX_TEXT_BYTES,
    Kind,
    LostError,
    block_checksum,
    pack_fetch,
    receive_body,
    receive_head,
    receive_text,
    send_frame,
)  # fmt: skip
from ostinato.errors import ConfigError, ConnectorError

__all__ = ["BlockClient"]

logger = logging.getLogger("ostinato")

OnBlock = Callable[[bytes, memoryview], None]
"""Is given the digest and the data, which are overwritten when it returns."""


class BlockClient:
    """One connection to a BlockServer, made when it is needed and kept for the next call.

    Safe from any thread; calls of `fetch` take turns.
    """

    def __init__(
        self, address: tuple[str, int], *, namespace: str, timeout_s: float, max_block_bytes: int = 64 * 2**20
    ) -> None:
        """Connects to nothing yet. `address` is host and port.

        `timeout_s` bounds the time until the connection stands, and then the time for each block, beyond what the
        server was asked to wait. Raises ConfigError for a namespace or time that cannot be.
        """
        if not 1 <= len(namespace.encode()) <= MAX_TEXT_BYTES:
            raise ConfigError(f"namespace must have 1 to {MAX_TEXT_BYTES} bytes", field="namespace")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s}: must be more than 0 s", field="timeout_s")
        self.address, self.namespace, self.timeout_s = address, namespace, timeout_s
        self.last_error: ConnectorError | None = None
        """Why the last `fetch` broke off; None if it ran to its end, which may be a block that the server lacks."""
        self._max_block_bytes = max_block_bytes
        self._buffer = memoryview(bytearray())
        self._sock: socket.socket | None = None
        self._request_id = 0
        self._closed = False
        self._turn = threading.RLock()

    def fetch(self, digests: Sequence[bytes], on_block: OnBlock, *, wait_s: float = 0.0) -> int:
        """Hand on blocks in the order of `digests`, up to the first that the server lacks; returns how many came.

        Each was checked against its checksum. The server waits for missing blocks for `wait_s` seconds in all.
        When the connection breaks in between, the blocks before that count, `last_error` says why, and the next call
        connects anew. Raises ConnectorError if no connection can be made (nobody is there, or what is there refuses or
        holds another namespace) and for digests of unequal length. What `on_block` raises ends call and connection.
        """
        with self._turn:
            self.last_error = None
            deadline = time.monotonic() + wait_s
            num_done = 0
            try:
                while num_done < len(digests):
                    part = digests[num_done : num_done + MAX_DIGESTS]
                    data = self._ask(part, deadline, may_reconnect=num_done == 0)
                    for index, digest in enumerate(part, 1):
                        if data is None:
                            return num_done
                        on_block(digest, data)
                        num_done += 1
                        data = self._receive(part, index, deadline)
            except _BrokenError as error:
                self._disconnect()
                self.last_error = ConnectorError(f"{self._name}: {error}")
                logger.warning("KV blocks: %d of %d came, then %s", num_done, len(digests), self.last_error)
            except BaseException:
                self._disconnect()  # in the middle of an answer, which nobody will read
                raise
            return num_done

    def close(self) -> None:
        """Ends the connection and a `fetch` that waits for it; later ones raise ConnectorError. From any thread."""
        self._closed = True
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with self._turn:
            self._disconnect()

    @property
    def _name(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    def _ask(self, part: Sequence[bytes], deadline: float, *, may_reconnect: bool) -> memoryview | None:
        """Send a request and receive the first frame of the answer, as `_receive` does."""
        self._request_id = (self._request_id + 1) % 2**32
        request = pack_fetch(self._request_id, deadline - time.monotonic(), part)
        if self._sock is not None:
            try:
                return self._send_and_receive(self._sock, request, part, deadline)
            except _BrokenError as error:
                if not may_reconnect or self._closed or not isinstance(error.__cause__, LostError | OSError):
                    raise
                self._disconnect()  # the server was restarted, or ended a connection that was idle: once more, anew
        elif not may_reconnect:
            raise _BrokenError("the client was closed")
        return self._send_and_receive(self._connect(), request, part, deadline)

    def _send_and_receive(
        self, sock: socket.socket, request: bytes, part: Sequence[bytes], deadline: float
    ) -> memoryview | None:
        try:
            send_frame(sock, Kind.FETCH, request, b"", self.timeout_s)
        except OSError as error:
            raise _BrokenError(f"the connection broke: {error}") from error
        return self._receive(part, 0, deadline)

    def _receive(self, part: Sequence[bytes], index: int, deadline: float) -> memoryview | None:
        """The data of block `index`, or None at the end of the answer. Raises _BrokenError."""
        sock = self._sock
        if sock is None:
            raise _BrokenError("the client was closed")
        due = max(deadline, time.monotonic()) + self.timeout_s
        limits = {Kind.END: END.size, Kind.REFUSED: MAX_TEXT_BYTES}
        if index < len(part):
            limits[Kind.BLOCK] = BLOCK.size + self._max_block_bytes
        try:
            kind, length = receive_head(sock, limits, due)
            if kind is Kind.REFUSED:
                raise ConnectorError(f"the server says: {receive_text(sock, length, due)}")
            if kind is Kind.BLOCK:
                return self._receive_block(sock, part[index], index, length, due)
            end = self._receive_struct(sock, END, length, due)
        except ConnectorError as error:
            raise _BrokenError(str(error)) from error
        if end != (self._request_id, index):
            raise _BrokenError(
                f"the server ended answer {end[0]} after {end[1]} blocks, not {self._request_id}, {index}"
            )
        return None

    def _receive_block(self, sock: socket.socket, digest: bytes, index: int, length: int, due: float) -> memoryview:
        request_id, number, checksum = self._receive_struct(sock, BLOCK, min(length, BLOCK.size), due)
        if (request_id, number) != (self._request_id, index):
            raise ConnectorError(f"block {number} of answer {request_id} came, not {index} of {self._request_id}")
        num_bytes = length - BLOCK.size
        if len(self._buffer) < num_bytes:
            self._buffer = memoryview(bytearray(num_bytes))
        data = self._buffer[:num_bytes]
        receive_body(sock, data, due)
        if block_checksum(digest, data) != checksum:
            raise ConnectorError(f"block {digest.hex()} does not match its checksum")
        return data

    def _receive_struct(self, sock: socket.socket, layout: struct.Struct, length: int, due: float) -> tuple[Any, ...]:
        if length != layout.size:
            raise ConnectorError(f"a frame of {length} bytes came, {layout.size} were due")
        body = bytearray(length)
        receive_body(sock, memoryview(body), due)
        return layout.unpack(body)

    def _connect(self) -> socket.socket:
        due = time.monotonic() + self.timeout_s
        if self._closed:
            raise ConnectorError(f"{self._name}: the client is closed")
        try:
            self._sock = sock = socket.create_connection(self.address, self.timeout_s)
            if self._closed:  # while it was being made
                raise ConnectorError("the client is closed")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send_frame(sock, Kind.HELLO, self.namespace.encode(), b"", self.timeout_s)
            kind, length = receive_head(sock, {Kind.WELCOME: MAX_TEXT_BYTES, Kind.REFUSED: MAX_TEXT_BYTES}, due)
            text = receive_text(sock, length, due)
        except (ConnectorError, OSError) as error:
            self._disconnect()
            raise ConnectorError(f"{self._name}: no connection to a block server: {error}") from error
        if kind is Kind.REFUSED or text != self.namespace:
            self._disconnect()
            reason = text if kind is Kind.REFUSED else f"it holds namespace {text!r}, not {self.namespace!r}"
            raise ConnectorError(f"{self._name}: refused: {reason}")
        return sock

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


class _BrokenError(Exception):
    """The connection is of no more use; what came before stays good."""
