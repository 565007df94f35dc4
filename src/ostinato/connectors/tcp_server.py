"""The end that offers blocks."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable

from ostinato.connectors.loans import MAX_LOANS, Loans, ReadableMemory
from ostinato.connectors.wire import (
    BLOCK,
    END,
    MAX_FETCH_BYTES,
    MAX_TEXT_BYTES,
    Fetch,
    Kind,
    block_checksum,
    receive_body,
    receive_head,
    receive_text,
    send_frame,
    unpack_fetch,
)  # fmt: skip
from ostinato.errors import ConfigError, ConnectorError

__all__ = ["BlockServer"]

logger = logging.getLogger("ostinato")

GetBlock = Callable[[bytes], "memoryview | bytes | None"]
"""The data of a block or None. Called from several threads at once; the data must not change until `DoneWith`."""

DoneWith = Callable[[bytes], None]
"""The data that `GetBlock` returned for this digest have been sent or read: once for each call that returned some."""

_LOOK_S = 0.5  # so often a request on hold looks whether its client is still there
_LINGER_S = 2.0
_NUM_REFUSING = 8  # connections over the limit that are told so; any more are closed without a word


class BlockServer:
    """Serves blocks by digest from the moment it is made until `close`, with one thread a connection."""

    def __init__(
        self,
        get: GetBlock,
        *,
        namespace: str,
        host: str = "127.0.0.1",
        port: int = 0,
        max_connections: int = 64,
        timeout_s: float = 30.0,
        done: DoneWith | None = None,
        memory: ReadableMemory | None = None,
    ) -> None:
        """Listens on `host`; port 0 takes a free one, and `address` says which.

        `timeout_s` is how long a client may take for its half of a frame, sent or received; between requests it may
        be silent as long as it likes. Where all blocks lie in `memory`, clients that can may read them there, and the
        time is then also for each block that they are reading. Raises ConnectorError if it cannot listen, ConfigError
        for an option.
        """
        if not 1 <= len(namespace.encode()) <= MAX_TEXT_BYTES:
            raise ConfigError(f"namespace must have 1 to {MAX_TEXT_BYTES} bytes", field="namespace")
        if max_connections < 1:
            raise ConfigError(f"max_connections={max_connections}: must be at least 1", field="max_connections")
        self.namespace = namespace
        self._get, self._timeout_s, self._max_connections = get, timeout_s, max_connections
        self._done: DoneWith = done or _ignore
        self._memory = memory
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family)
        except (OSError, OverflowError) as error:
            raise ConnectorError(f"cannot listen on {host}:{port} for KV blocks: {error}") from error
        name = self._listener.getsockname()
        self.address: tuple[str, int] = (name[0], name[1])
        self._changed = threading.Condition()  # guards all below
        self._num_changes = 0
        self._closing = False
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._num_serving = 0
        self._waker, self._wakened = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="ostinato-blocks", daemon=True)
        self._thread.start()

    def block_added(self) -> None:
        """There is a block that was not there before: requests on hold look again. Cheap; safe from any thread."""
        with self._changed:
            self._num_changes += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all connections, in the middle of a block if need be, and waits for a `get` that runs."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._waker.send(b"x")
        self._thread.join()
        with self._changed:
            threads = list(self._connections.values())
            for sock in self._connections:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for sock in (self._listener, self._waker, self._wakened):
            sock.close()

    def _accept(self) -> None:
        poller = select.poll()
        for watched in (self._listener, self._wakened):
            poller.register(watched, select.POLLIN)
        while True:
            # a thread that sits in `accept` could not be told to end
            if any(descriptor == self._wakened.fileno() for descriptor, _ in poller.poll()):
                return
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                logger.warning("a connection for KV blocks could not be accepted: %s", error)
                time.sleep(_LOOK_S)  # most often there are no file descriptors left: not in a hot loop
                continue
            with self._changed:
                if len(self._connections) >= self._max_connections + _NUM_REFUSING:
                    sock.close()
                    continue
                name = f"{peer[0]}:{peer[1]}"
                thread = threading.Thread(target=self._run, args=(sock, name), name="ostinato-blocks-to", daemon=True)
                self._connections[sock] = thread
                try:
                    thread.start()
                except RuntimeError as error:
                    logger.warning("client %s of KV blocks: %s", name, error)
                    del self._connections[sock]
                    sock.close()

    def _run(self, sock: socket.socket, name: str) -> None:
        serving = False
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that went away without a word
            try:
                self._greet(sock)
                serving = self._claim()
                send_frame(sock, Kind.WELCOME, self.namespace.encode(), b"", self._timeout_s)
                while self._await_request(sock):
                    self._serve(sock)
            except ConnectorError as error:
                if not self._closing:
                    logger.warning("client %s of KV blocks: %s", name, error)
                    self._refuse(sock, str(error))
        except OSError as error:
            if not self._closing:
                logger.warning("client %s of KV blocks: the connection broke: %s", name, error)
        finally:
            with self._changed:
                self._num_serving -= serving
                del self._connections[sock]
                sock.close()  # in here, so that `close` never shuts down a descriptor that is another's by now

    def _greet(self, sock: socket.socket) -> None:
        due = time.monotonic() + self._timeout_s
        _, length = receive_head(sock, {Kind.HELLO: MAX_TEXT_BYTES}, due)
        namespace = receive_text(sock, length, due)
        if namespace != self.namespace:
            raise ConnectorError(f"this server holds namespace {self.namespace!r}, not {namespace!r}")

    def _claim(self) -> bool:
        with self._changed:
            if self._num_serving >= self._max_connections:
                raise ConnectorError(f"all {self._max_connections} connections of this server are taken")
            self._num_serving += 1
            return True

    def _refuse(self, sock: socket.socket, reason: str) -> None:
        """Say why, and see to it that it arrives: closing with input unread would take the words back."""
        due = time.monotonic() + _LINGER_S
        with contextlib.suppress(OSError):  # it may be gone
            send_frame(sock, Kind.REFUSED, reason.encode()[:MAX_TEXT_BYTES], b"", _LINGER_S)
            sock.shutdown(socket.SHUT_WR)
            while (left_s := due - time.monotonic()) > 0:
                sock.settimeout(left_s)
                if not sock.recv(4096):
                    return

    def _await_request(self, sock: socket.socket) -> bool:
        """Whether there is something to read; False when the client has left."""
        sock.settimeout(None)
        return bool(sock.recv(1, socket.MSG_PEEK))

    def _serve(self, sock: socket.socket) -> None:
        """One request."""
        due = time.monotonic() + self._timeout_s
        limits = {Kind.FETCH: MAX_FETCH_BYTES, Kind.LOCATE: MAX_FETCH_BYTES, Kind.DESCRIBE: 0}
        kind, length = receive_head(sock, limits, due)
        body = bytearray(length)
        receive_body(sock, memoryview(body), due)
        if kind is Kind.DESCRIBE:
            self._describe(sock)
        elif kind is Kind.FETCH:
            self._answer(sock, unpack_fetch(memoryview(body)))
        elif self._memory is None:
            raise ConnectorError("LOCATE: this server only sends blocks")
        else:
            self._lend(sock, unpack_fetch(memoryview(body)), self._memory)

    def _describe(self, sock: socket.socket) -> None:
        if self._memory is None:
            send_frame(sock, Kind.DECLINED, b"the server has no NIXL", b"", self._timeout_s)
        else:
            send_frame(sock, Kind.METADATA, self._memory.metadata, b"", self._timeout_s)

    def _lend(self, sock: socket.socket, request: Fetch, memory: ReadableMemory) -> None:
        deadline = time.monotonic() + request.wait_s
        loans = Loans(sock, request.request_id, memory, self._done, self._timeout_s)
        try:
            for digest in request.digests:
                loans.settle(MAX_LOANS - 1)
                data = self._try_get(digest)
                if data is None:
                    loans.settle()  # the client may need this thread for what it reads, so it does not wait before
                    data = self._get_or_wait(sock, digest, deadline)
                if data is None:
                    break
                loans.lend(digest, data)
            loans.settle()
        finally:
            loans.close()
        send_frame(sock, Kind.END, END.pack(request.request_id, loans.count), b"", self._timeout_s)

    def _answer(self, sock: socket.socket, request: Fetch) -> None:
        deadline = time.monotonic() + request.wait_s
        count = 0
        for digest in request.digests:
            data = self._get_or_wait(sock, digest, deadline)
            if data is None:
                break
            try:
                prefix = BLOCK.pack(request.request_id, count, block_checksum(digest, data))
                send_frame(sock, Kind.BLOCK, prefix, data, self._timeout_s)
            finally:
                self._done(digest)
            count += 1
        send_frame(sock, Kind.END, END.pack(request.request_id, count), b"", self._timeout_s)

    def _get_or_wait(self, sock: socket.socket, digest: bytes, deadline: float) -> memoryview | None:
        while True:
            num_seen = self._num_changes  # before `get`: a block that comes right after it is noticed
            data = self._try_get(digest)
            if data is not None:
                return data
            with self._changed:
                while self._num_changes == num_seen and not self._closing:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0 or _has_left(sock):
                        return None
                    self._changed.wait(min(left_s, _LOOK_S))
                if self._closing:
                    return None

    def _try_get(self, digest: bytes) -> memoryview | None:
        try:
            data = self._get(digest)
            return None if data is None else memoryview(data).cast("B")
        except Exception:
            logger.exception("KV block %s could not be read and counts as missing", digest.hex())
            return None


def _ignore(digest: bytes) -> None:
    """For blocks that never change."""


def _has_left(sock: socket.socket) -> bool:
    """Whether the other end has closed the connection, without waiting."""
    sock.settimeout(0)
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
