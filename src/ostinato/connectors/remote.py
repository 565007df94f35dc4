"""`TcpConnector`: KV from one engine to another. The producer keeps what it computes in host memory and serves it, the
consumer asks it for the blocks of its prompts.

Which blocks, and that they are there, is settled over TCP. Their bytes come over the same connection, or, where both
ends have NIXL, by reads of the producer's host memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any

from ostinato.connectors.nixl import NixlMemory, NixlReader, choose_nixl
from ostinato.connectors.published import PublishedBlocks
from ostinato.connectors.store import Deliver
from ostinato.connectors.tcp import BlockClient, BlockServer
from ostinato.connectors.tcp_client import MemoryReader
from ostinato.errors import ConfigError, ConnectorError

if TYPE_CHECKING:
    from ostinato.connectors.protocol import KVConnector
    from ostinato.connectors.registry import ConnectorContext

__all__ = ["RemoteBlocks", "make_tcp_connector"]

logger = logging.getLogger("ostinato")

_DEFAULT_BYTES = 4 << 30
_PRODUCER_STAGING_BYTES = 256 << 20
_OPTIONS = {"timeout_s", "wait_s", "retry_s", "max_bytes", "transport"}


class RemoteBlocks:
    """A BlockStore that reads from the server at `address`, over as many connections as there are calls at once.

    `wait_s` is for how long the server is asked to wait for a block that it does not have yet. After a failure it is
    left alone for `retry_s`, and all blocks count as missing: one that is down must not hold up every request.
    `make_reader` makes what reads its memory, one for each connection; without, blocks come over the connection.
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
        make_reader: Callable[[], MemoryReader] | None = None,
    ) -> None:
        self._wait_s, self._retry_s = wait_s, retry_s
        self._retry_at = 0.0
        self._lock, self._fallback = Lock(), ""
        self._clients = [
            BlockClient(
                address,
                namespace=namespace,
                timeout_s=timeout_s,
                max_block_bytes=block_bytes,
                reader=None if make_reader is None else make_reader(),
                on_fallback=self._say_fallback,
            )
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

    def fetched(self) -> Mapping[str, int]:
        """Blocks that came, by transport."""
        return {
            "tcp": sum(client.num_sent for client in self._clients),
            "nixl": sum(client.num_read for client in self._clients),
        }

    def _say_fallback(self, reason: str) -> None:
        """Once, not for each connection."""
        with self._lock:
            said, self._fallback = self._fallback, reason
        if said != reason:
            logger.warning("KV blocks come over TCP, not by NIXL: %s", reason)

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
    nixl = choose_nixl(context.extra.get("transport", "auto"))
    namespace = context.namespace()
    if context.role == "kv_producer":
        published = _publish(context, max_bytes, timeout_s, namespace, nixl)
        return connector_over(published, context, has=published.has, reads=False, default_bytes=_PRODUCER_STAGING_BYTES)
    block_bytes = context.block_bytes
    remote = RemoteBlocks(
        (context.ip, context.port),
        namespace=namespace,
        block_bytes=block_bytes,
        num_connections=context.whole("io_threads", 4),
        timeout_s=timeout_s,
        wait_s=wait_s,
        retry_s=retry_s,
        make_reader=None if nixl is None else lambda: NixlReader(nixl, block_bytes),
    )
    return connector_over(remote, context, writes=False, fetched=remote.fetched)


def _publish(
    context: ConnectorContext, max_bytes: int, timeout_s: float, namespace: str, nixl: Any | None
) -> PublishedBlocks:
    published = PublishedBlocks(max_bytes, context.block_bytes)
    if nixl is not None:
        try:
            published.shared = NixlMemory(nixl, published.memory)
        except ConnectorError as error:
            logger.warning("KV blocks are served over TCP alone: %s", error)
    try:
        published.server = BlockServer(
            published.get,
            namespace=namespace,
            host=context.ip,
            port=context.port,
            timeout_s=timeout_s,
            done=published.done,
            memory=published.shared,
        )
    except BaseException:
        published.close()
        raise
    logger.info(
        "KV blocks are served at %s:%d, %s",
        *published.server.address,
        "over TCP" if published.shared is None else "by NIXL and over TCP",
    )
    return published
