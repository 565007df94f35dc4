"""A place for KV blocks outside the engine, as connectors over host memory see it: all there is to write for a new one.
No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["BlockStore", "Deliver"]

Deliver = Callable[["memoryview | bytes"], bool]
"""Is given the data of the next block, which may change once it returns. False: no more is wanted."""


class BlockStore(Protocol):
    """Called on threads of its own, several at once, which it may keep waiting. What it raises is logged and counted:
    the blocks that were read before stay good, and what is missing is computed.

    A digest names the content of a block and of all that comes before it. Data is `ConnectorContext.block_bytes` long;
    whoever keeps it must be sure that it gives back the same bytes, for the model and the layout of
    `ConnectorContext.namespace()`, or nothing.
    """

    def read(self, digests: Sequence[bytes], deliver: Deliver) -> None:
        """Hands on the blocks in this order, up to the first that is missing, or until `deliver` wants no more."""

    def write(self, digest: bytes, data: memoryview) -> bool:
        """Keeps a block, whose memory is another's afterwards; whether it did."""

    def close(self) -> None:
        """Ends calls that wait. Nothing is called afterwards."""
