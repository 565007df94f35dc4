"""KV blocks from one process to another over TCP: `BlockServer` offers them, `BlockClient` fetches them.

There is no authentication and no encryption: for one host, or a network whose hosts trust each other.
"""

from __future__ import annotations

from ostinato.connectors.tcp_client import BlockClient
from ostinato.connectors.tcp_server import BlockServer

__all__ = ["BlockClient", "BlockServer"]
