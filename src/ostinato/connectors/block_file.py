"""One KV block as a file: a safetensors file with one uint8 tensor `kv`, whose metadata says which block it is.

The header follows from digest, namespace and data alone, byte for byte. So a reader parses nothing: it computes the
header that the file must have and compares. Any other file, damaged, foreign or of another block, differs somewhere.
"""

from __future__ import annotations

import json
import os
import struct
from hashlib import sha256
from pathlib import Path

__all__ = ["FORMAT_VERSION", "DamagedBlockError", "block_header", "file_bytes", "namespace_of", "read_block"]

FORMAT_VERSION = 1

_LENGTH = struct.Struct("<Q")  # of the JSON that follows, as the safetensors format has it
_MAX_HEADER_BYTES = 4096


class DamagedBlockError(Exception):
    """A file is not what its name says. Stays inside the connectors: to a caller the block is missing."""


def namespace_of(**facts: object) -> str:
    """A short stable name, 24 hex digits, for everything that must be equal for KV blocks to be exchanged.

    For example the model's fingerprint, dtype, shape of a block. Facts are strings, numbers, booleans, None or lists
    and dicts of such; TypeError for any other, because its text might differ from one process to the next.
    """
    text = json.dumps({"format": FORMAT_VERSION, "facts": facts}, sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()[:24]


def block_header(digest: bytes, namespace: str, num_bytes: int, checksum: bytes) -> bytes:
    """Everything in the file before its `num_bytes` bytes of data; `checksum` is their SHA-256."""
    metadata = {
        "format": "ostinato-kv-block",
        "version": str(FORMAT_VERSION),
        "namespace": namespace,
        "digest": digest.hex(),
        "sha256": checksum.hex(),
    }
    tensor = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}
    text = json.dumps({"__metadata__": metadata, "kv": tensor}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins at a multiple of 8, as the official writer has it
    return _LENGTH.pack(len(text)) + text


def file_bytes(digest: bytes, namespace: str, num_bytes: int) -> int:
    """Size of the file of a block with `num_bytes` bytes of data."""
    return len(block_header(digest, namespace, num_bytes, bytes(sha256().digest_size))) + num_bytes


def read_block(path: Path, digest: bytes, namespace: str, max_bytes: int) -> bytes:
    """The data in the file of block `digest`. `max_bytes` bounds what is read of a file that is no block's.

    Raises DamagedBlockError when the file holds anything else, OSError when it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise DamagedBlockError(f"has {size} bytes, of at most {max_bytes}")
        prefix = _read(file.fileno(), _LENGTH.size)
        length: int = _LENGTH.unpack(prefix)[0]
        num_bytes = size - _LENGTH.size - length
        if length > _MAX_HEADER_BYTES or num_bytes < 0:
            raise DamagedBlockError(f"has {size} bytes and no header, or only a part of it")
        header = prefix + _read(file.fileno(), length)
        data = _read(file.fileno(), num_bytes)
    if header != block_header(digest, namespace, num_bytes, sha256(data).digest()):
        raise DamagedBlockError(
            f"has {size} bytes that are damaged, or belong to another block, namespace or version of the format"
        )
    return data


def _read(fd: int, num_bytes: int) -> bytes:
    """Exactly `num_bytes` bytes; one read and no copy unless the system returns less."""
    data = os.read(fd, num_bytes)
    while len(data) < num_bytes:
        more = os.read(fd, num_bytes - len(data))
        if not more:
            raise DamagedBlockError(f"ends {num_bytes - len(data)} bytes early")
        data += more
    return data
