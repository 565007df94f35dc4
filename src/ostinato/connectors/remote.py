"""`TcpConnector`: KV from one engine to another. The producer keeps what it computes in host memory and serves it, the
consumer asks it for the blocks of its prompts.

What carries the blocks is behind `BlockStore`: another transport is another pair of these classes.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING

from ostinato.connectors.store import Deliver
from ostinato.connectors.tcp import BlockClient, BlockServer
from ostinato.errors import ConfigError, ConnectorError

if TYPE_CHECKING:
    from ostinato.connectors.protocol import KVConnector
    from ostinato.connectors.registry import ConnectorContext

__all__ = ["PublishedBlocks", "RemoteBlocks", "make_tcp_connector"]

logger = logging.getLogger("ostinato")

_DEFAULT_BYTES = 4 << 30
_PRODUCER_STAGING_BYTES = 256 << 20
_OPTIONS = {"timeout_s", "wait_s", "retry_s", "max_bytes"}


class PublishedBlocks:
    """A BlockStore that is written here and read over TCP; the longest unused blocks go when it has `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = Lock()
        self.server: BlockServer | None = None

    def get(self, digest: bytes) -> bytes | None:
        """For the server; a use."""
        with self._lock:
            if digest in self._blocks:
                self._blocks.move_to_end(digest)
            return self._blocks.get(digest)

    def has(self, digest: bytes) -> bool:
        """A use too: the engine has just met a prompt with it."""
        return self.get(digest) is not None

    def read(self, digests: Sequence[bytes], deliver: Deliver) -> None:
        """Others read it."""

    def write(self, digest: bytes, data: memoryview) -> bool:
        if data.nbytes > self._max_bytes:
            return False
        copy = bytes(data)
        with self._lock:
            old = self._blocks.pop(digest, b"")
            self._num_bytes += len(copy) - len(old)
            self._blocks[digest] = copy
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= len(self._blocks.popitem(last=False)[1])
        if self.server is not None:
            self.server.block_added()
        return True

    def close(self) -> None:
        if self.server is not None:
            self.server.close()


class RemoteBlocks:
    """A BlockStore that reads from the server at `address`, over as many connections as there are calls at once.

    `wait_s` is for how long the server is asked to wait for a block that it does not have yet. After a failure it is
    left alone for `retry_s`, and all blocks count as missing: one that is down must not hold up every request.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        namespace: str,
        block_bytes: int,
        num_connections: int,
        timeout_s: float,
        wait_s: float,
        retry_s: float,
    ) -> None:
        self._wait_s, self._retry_s = wait_s, retry_s
        self._retry_at = 0.0
        self._clients = [
            BlockClient(address, namespace=namespace, timeout_s=timeout_s, max_block_bytes=block_bytes)
            for _ in range(num_connections)
        ]
        self._idle: SimpleQueue[BlockClient] = SimpleQueue()
        for client in self._clients:
            self._idle.put(client)

    def read(self, digests: Sequence[bytes], deliver: Deliver) -> None:
        if time.monotonic() < self._retry_at:
            return
        client = self._idle.get()

        def on_block(digest: bytes, data: memoryview) -> None:
            if not deliver(data):
                raise _EnoughError

        try:
            client.fetch(digests, on_block, wait_s=self._wait_s)
            if client.last_error is not None:
                raise client.last_error
        except _EnoughError:
            pass
        except ConnectorError:
            self._retry_at = time.monotonic() + self._retry_s
            raise
        finally:
            self._idle.put(client)

    def write(self, digest: bytes, data: memoryview) -> bool:
        """The server has its own."""
        return False

    def close(self) -> None:
        for client in self._clients:
            client.close()


class _EnoughError(Exception):
    """No more blocks are wanted; the connection ends in the middle of the answer."""


def make_tcp_connector(context: ConnectorContext) -> KVConnector:
    """`kv_ip` and `kv_port` are where the producer listens. Raises ConfigError, and ConnectorError where it cannot."""
    from ostinato.connectors.staged_worker import STAGED_OPTIONS, connector_over

    context.check_options({*_OPTIONS, *STAGED_OPTIONS})
    if context.role == "kv_both":
        raise ConfigError("kv_role='kv_both': TcpConnector has two ends, kv_producer and kv_consumer")
    timeout_s, wait_s = context.seconds("timeout_s", 10.0), context.seconds("wait_s", 0.2)
    retry_s, max_bytes = context.seconds("retry_s", 5.0), context.whole("max_bytes", _DEFAULT_BYTES)
    namespace = context.namespace()
    if context.role == "kv_producer":
        published = PublishedBlocks(max_bytes)
        server = BlockServer(
            published.get, namespace=namespace, host=context.ip, port=context.port, timeout_s=timeout_s
        )
        published.server = server
        logger.info("KV blocks are served at %s:%d", *server.address)
        return connector_over(published, context, has=published.has, reads=False, default_bytes=_PRODUCER_STAGING_BYTES)
    remote = RemoteBlocks(
        (context.ip, context.port),
        namespace=namespace,
        block_bytes=context.block_bytes,
        num_connections=context.whole("io_threads", 4),
        timeout_s=timeout_s,
        wait_s=wait_s,
        retry_s=retry_s,
    )
    return connector_over(remote, context, writes=False)
