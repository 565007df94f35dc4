"""`DiskConnector`: the prefix cache on disk, where it outlives the process. What the files are, `files` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ostinato.connectors.files import BlockFiles
from ostinato.connectors.store import Deliver
from ostinato.errors import ConfigError

if TYPE_CHECKING:
    from ostinato.connectors.protocol import KVConnector
    from ostinato.connectors.registry import ConnectorContext

__all__ = ["DiskBlocks", "make_disk_connector"]

_DEFAULT_BYTES = 32 << 30


class DiskBlocks:
    """A BlockStore of files."""

    def __init__(self, files: BlockFiles) -> None:
        self.files = files

    def read(self, digests: Sequence[bytes], deliver: Deliver) -> None:
        for digest in digests:
            data = self.files.get(digest)
            if data is None or not deliver(data):
                return

    def write(self, digest: bytes, data: memoryview) -> bool:
        return self.files.put(digest, data)

    def close(self) -> None:
        self.files.close()


def make_disk_connector(context: ConnectorContext) -> KVConnector:
    """A `kv_producer` only writes, a `kv_consumer` only reads, `kv_both` does both. Raises ConfigError."""
    from ostinato.connectors.staged_worker import STAGED_OPTIONS, connector_over

    context.check_options({"path", "shared_storage_path", "max_bytes", "fsync", *STAGED_OPTIONS})
    path = context.extra.get("path", context.extra.get("shared_storage_path"))
    if not isinstance(path, str) or not path:
        raise ConfigError(f"kv_connector_extra_config: path={path!r}: must be the folder that the blocks go to")
    files = BlockFiles(
        path,
        namespace=context.namespace(),
        max_bytes=context.whole("max_bytes", _DEFAULT_BYTES),
        fsync=context.flag("fsync", False),
    )
    role = context.role
    return connector_over(
        DiskBlocks(files), context, has=files.known, reads=role != "kv_producer", writes=role != "kv_consumer"
    )
