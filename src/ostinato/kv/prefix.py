"""Content hashes of full KV blocks.

The KV of a token depends on every token before it, so a block is named by a chain: its digest covers the digest of the
block before it and its own token ids. Two blocks with one digest hold the KV of the same whole prefix. BLAKE2b with 32
bytes, because a collision would show one user another's cache.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

__all__ = ["HashChain", "block_hashes"]

_DIGEST_BYTES = 32


def block_hashes(tokens: Sequence[int], block_size: int, parent: bytes = b"") -> list[bytes]:
    """Digests of the full blocks of `tokens`; a trailing partial block has none.

    `parent` is the digest of the block before the first one, or a salt that keeps chains apart at the root.
    """
    pack = struct.Struct(f"<{block_size}q").pack  # a fixed width and order, so that no two lists of ids pack alike
    digests = []
    for end in range(block_size, len(tokens) + 1, block_size):
        content = pack(*tokens[end - block_size : end])
        parent = blake2b(content + parent, digest_size=_DIGEST_BYTES).digest()
        digests.append(parent)
    return digests


class HashChain:
    """The digests of one growing sequence, each computed once."""

    __slots__ = ("_block_size", "_digests", "_salt")

    def __init__(self, block_size: int, salt: bytes = b"") -> None:
        self._block_size = block_size
        self._salt = salt
        self._digests: list[bytes] = []

    def digests(self, tokens: Sequence[int]) -> Sequence[bytes]:
        """Digests of the full blocks of `tokens`, which must begin with the tokens of the call before."""
        done = len(self._digests) * self._block_size
        if len(tokens) - done >= self._block_size:
            parent = self._digests[-1] if self._digests else self._salt
            self._digests += block_hashes(tokens[done:], self._block_size, parent)
        return self._digests
