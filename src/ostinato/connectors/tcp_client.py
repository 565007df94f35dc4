"""The end that fetches blocks."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ostinato.connectors.wire import (
    BLOCK,
    DONE,
    END,
    MAX_DIGESTS,
    MAX_METADATA_BYTES,
    MAX_TEXT_BYTES,
    PLACE,
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

__all__ = ["MAX_FAILED_READS", "BlockClient", "MemoryReader"]

logger = logging.getLogger("ostinato")

MAX_FAILED_READS = 3
"""One may have met a server that was just going; so many in a row, and the two hosts cannot read from each other."""

OnBlock = Callable[[bytes, memoryview], None]
"""Is given the digest and the data, which are overwritten when it returns."""


class MemoryReader(Protocol):
    """Reads the server's memory without the server, as `nixl.NixlReader`. All raise ConnectorError."""

    def join(self, metadata: bytes) -> None: ...

    def read(self, address: int, num_bytes: int, due: float, stopped: Callable[[], bool]) -> memoryview: ...

    def close(self) -> None: ...


class BlockClient:
    """One connection to a BlockServer, made when it is needed and kept for the next call.

    Safe from any thread; calls of `fetch` take turns.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        namespace: str,
        timeout_s: float,
        max_block_bytes: int = 64 * 2**20,
        reader: MemoryReader | None = None,
        on_fallback: Callable[[str], None] | None = None,
    ) -> None:
        """Connects to nothing yet. `address` is host and port.

        `timeout_s` bounds the time until the connection stands, and then the time for each block, beyond what the
        server was asked to wait. Raises ConfigError for a namespace or time that cannot be.

        With a `reader` blocks come through it where the server allows that, and otherwise over the connection:
        `on_fallback` is told why. A reader that has failed MAX_FAILED_READS times in a row is not used again.
        """
        if not 1 <= len(namespace.encode()) <= MAX_TEXT_BYTES:
            raise ConfigError(f"namespace must have 1 to {MAX_TEXT_BYTES} bytes", field="namespace")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s}: must be more than 0 s", field="timeout_s")
        self.address, self.namespace, self.timeout_s = address, namespace, timeout_s
        self.last_error: ConnectorError | None = None
        """Why the last `fetch` broke off; None if it ran to its end, which may be a block that the server lacks."""
        self.num_sent = self.num_read = 0
        """Blocks that came over the connection, and through the reader."""
        self._reader, self._on_fallback = reader, on_fallback
        self._num_failed_reads = 0  # since the last that succeeded
        self._reads = False  # whether the server that is connected lets the reader read
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
            if self._reader is not None:
                self._reader.close()

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
            send_frame(sock, Kind.LOCATE if self._reads else Kind.FETCH, request, b"", self.timeout_s)
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
            if self._reads:
                limits[Kind.PLACE] = PLACE.size
            else:
                limits[Kind.BLOCK] = BLOCK.size + self._max_block_bytes
        try:
            kind, length = receive_head(sock, limits, due)
            if kind is Kind.REFUSED:
                raise ConnectorError(f"the server says: {receive_text(sock, length, due)}")
            if kind is Kind.BLOCK:
                return self._receive_block(sock, part[index], index, length, due)
            if kind is Kind.PLACE:
                return self._read_block(sock, part[index], index, length, due)
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
        self._check_order(request_id, number, index)
        num_bytes = length - BLOCK.size
        if len(self._buffer) < num_bytes:
            self._buffer = memoryview(bytearray(num_bytes))
        data = self._buffer[:num_bytes]
        receive_body(sock, data, due)
        _check_content(digest, data, checksum)
        self.num_sent += 1
        return data

    def _read_block(self, sock: socket.socket, digest: bytes, index: int, length: int, due: float) -> memoryview:
        request_id, number, checksum, address, num_bytes = self._receive_struct(sock, PLACE, length, due)
        self._check_order(request_id, number, index)
        reader = self._reader
        assert reader is not None
        try:
            if num_bytes > self._max_block_bytes:
                raise ConnectorError(f"a block of {num_bytes} bytes lies there, at most {self._max_block_bytes} may")
            data = reader.read(address, num_bytes, due, lambda: self._closed)
        except ConnectorError as error:
            if not self._closed:
                self._num_failed_reads += 1
            if self._num_failed_reads >= MAX_FAILED_READS:
                self._give_up_reader(str(error))
            raise
        self._num_failed_reads = 0
        try:
            send_frame(sock, Kind.DONE, DONE.pack(request_id, index + 1), b"", self.timeout_s)
        except OSError as error:
            raise LostError(f"the connection broke: {error}") from error
        _check_content(digest, data, checksum)
        self.num_read += 1
        return data

    def _check_order(self, request_id: int, number: int, index: int) -> None:
        if (request_id, number) != (self._request_id, index):
            raise ConnectorError(f"block {number} of answer {request_id} came, not {index} of {self._request_id}")

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
        if self._reader is not None:
            self._join(sock, self._reader, due)
        return sock

    def _join(self, sock: socket.socket, reader: MemoryReader, due: float) -> None:
        try:
            send_frame(sock, Kind.DESCRIBE, b"", b"", self.timeout_s)
            limits = {Kind.METADATA: MAX_METADATA_BYTES, Kind.DECLINED: MAX_TEXT_BYTES, Kind.REFUSED: MAX_TEXT_BYTES}
            kind, length = receive_head(sock, limits, due)
            body = bytearray(length)
            receive_body(sock, memoryview(body), due)
        except (ConnectorError, OSError) as error:
            self._disconnect()
            raise ConnectorError(f"{self._name}: no connection to a block server: {error}") from error
        text = body.decode(errors="replace")
        if kind is Kind.REFUSED:
            self._disconnect()
            raise ConnectorError(f"{self._name}: refused: {text}")
        if kind is Kind.DECLINED:
            self._fall_back(text)
            return
        try:
            reader.join(bytes(body))
            self._reads = True
        except ConnectorError as error:
            self._give_up_reader(str(error))

    def _give_up_reader(self, reason: str) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None
        self._fall_back(reason)

    def _fall_back(self, reason: str) -> None:
        if self._on_fallback is not None:
            self._on_fallback(reason)

    def _disconnect(self) -> None:
        self._reads = False
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _check_content(digest: bytes, data: memoryview, checksum: bytes) -> None:
    if block_checksum(digest, data) != checksum:
        raise ConnectorError(f"block {digest.hex()} does not match its checksum")


class _BrokenError(Exception):
    """The connection is of no more use; what came before stays good."""
