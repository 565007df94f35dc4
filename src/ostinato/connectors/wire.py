"""Frames between a block server and its clients.

A frame is a head of 12 bytes and a body: magic, protocol version, kind, two bytes of zero, length of the body. The head
is the same in all versions, so that an end can tell another version from rubbish. All integers are little-endian.

    client                               server
    HELLO    namespace            ->
                                  <-     WELCOME  namespace, or REFUSED reason (and the connection ends)
    FETCH    id, wait, digests    ->
                                  <-     BLOCK    id, index, checksum, data; one for each block, in order
                                  <-     END      id, number of blocks sent

The server sends blocks until one is missing, without being asked for each. Or the client reads them by itself:

    DESCRIBE                      ->
                                  <-     METADATA of the server's memory, or DECLINED reason
    LOCATE   id, wait, digests    ->
                                  <-     PLACE    id, index, checksum, address, bytes; one for each block, in order
    DONE     id, number read      ->
                                  <-     END      id, number of blocks, once the client has read them all
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from enum import IntEnum
from hashlib import sha256
from typing import NamedTuple

from ostinato.errors import ConnectorError

__all__ = [
    "BLOCK", "CHECKSUM_BYTES", "DONE", "END", "MAX_DIGESTS", "MAX_METADATA_BYTES", "MAX_TEXT_BYTES", "PLACE",
    "Fetch", "Kind", "LostError", "block_checksum", "pack_fetch", "receive_body", "receive_head", "receive_text",
    "send_frame", "unpack_fetch",
]  # fmt: skip

PROTOCOL_VERSION = 1
MAX_TEXT_BYTES = 1024
MAX_DIGESTS = 4096
"""In one FETCH. A longer list is fetched in parts."""
MAX_DIGEST_BYTES = 64
MAX_METADATA_BYTES = 2**20
MAX_WAIT_MS = 2**32 - 1

CHECKSUM_BYTES = 32
BLOCK = struct.Struct(f"<II{CHECKSUM_BYTES}s")
END = struct.Struct("<II")
PLACE = struct.Struct(f"<II{CHECKSUM_BYTES}sQI")
DONE = struct.Struct("<II")

_MAGIC = b"OSTb"
_HEAD = struct.Struct("<4sBBHI")
_FETCH = struct.Struct("<IIHH")  # id, milliseconds to wait, number of digests, bytes of each
_MORE: int = getattr(socket, "MSG_MORE", 0)  # Linux: a head waits for its body instead of going as a packet of its own


class LostError(ConnectorError):
    """The connection has ended; nothing wrong came over it."""


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    FETCH = 4
    BLOCK = 5
    END = 6
    DESCRIBE = 7
    METADATA = 8
    DECLINED = 9
    LOCATE = 10
    PLACE = 11
    DONE = 12


class Fetch(NamedTuple):
    request_id: int
    wait_s: float
    digests: list[bytes]


def block_checksum(digest: bytes, data: memoryview) -> bytes:
    """SHA-256 over which block it is and what it holds: the right bytes of another block do not pass either."""
    checksum = sha256(digest)
    checksum.update(data)
    return checksum.digest()


def pack_fetch(request_id: int, wait_s: float, digests: Sequence[bytes]) -> bytes:
    """Raises ConnectorError for digests that are empty, too long or of unequal length."""
    length = len(digests[0])
    if not 1 <= length <= MAX_DIGEST_BYTES or any(len(digest) != length for digest in digests):
        raise ConnectorError(f"digests must all have the same length, of 1 to {MAX_DIGEST_BYTES} bytes")
    wait_ms = min(MAX_WAIT_MS, max(0, round(wait_s * 1000)))
    return _FETCH.pack(request_id, wait_ms, len(digests), length) + b"".join(digests)


def unpack_fetch(body: memoryview) -> Fetch:
    """Raises ConnectorError for a body that does not add up."""
    if len(body) < _FETCH.size:
        raise ConnectorError(f"FETCH has {len(body)} bytes, at least {_FETCH.size} are needed")
    request_id, wait_ms, count, length = _FETCH.unpack_from(body)
    rest = bytes(body[_FETCH.size :])
    if not 1 <= count <= MAX_DIGESTS or not 1 <= length <= MAX_DIGEST_BYTES or len(rest) != count * length:
        raise ConnectorError(f"FETCH says {count} digests of {length} bytes and has {len(rest)} bytes of them")
    return Fetch(request_id, wait_ms / 1000, [rest[at : at + length] for at in range(0, len(rest), length)])


MAX_FETCH_BYTES = _FETCH.size + MAX_DIGESTS * MAX_DIGEST_BYTES


def send_frame(sock: socket.socket, kind: Kind, prefix: bytes, data: memoryview | bytes, timeout_s: float) -> None:
    """Send a frame with the body `prefix` + `data`, each within `timeout_s`. Raises OSError."""
    view = memoryview(data).cast("B")
    head = _HEAD.pack(_MAGIC, PROTOCOL_VERSION, kind, 0, len(prefix) + view.nbytes) + prefix
    sock.settimeout(timeout_s)  # which `sendall` takes for the whole, not for each piece
    sock.sendall(head, _MORE if view.nbytes else 0)
    if view.nbytes:
        sock.sendall(view)


def receive_head(sock: socket.socket, limits: dict[Kind, int], deadline: float) -> tuple[Kind, int]:
    """The kind and the body's length of the next frame, of those kinds in `limits` and with at most so many bytes.

    `deadline` is of `time.monotonic`. Raises ConnectorError for anything else, and for an end that stalls or leaves.
    """
    head = bytearray(_HEAD.size)
    receive_body(sock, memoryview(head), deadline)
    magic, version, number, _, length = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise ConnectorError(f"the other end does not speak this protocol: it sent {bytes(head)!r}")
    if version != PROTOCOL_VERSION:
        raise ConnectorError(f"the other end speaks version {version} of the protocol, this one {PROTOCOL_VERSION}")
    if number not in limits:
        wanted = " or ".join(kind.name for kind in limits)
        raise ConnectorError(f"the other end sent a frame of kind {number} where {wanted} was due")
    kind = Kind(number)
    if length > limits[kind]:
        raise ConnectorError(f"the other end sent a {kind.name} of {length} bytes, at most {limits[kind]} are allowed")
    return kind, length


def receive_body(sock: socket.socket, into: memoryview, deadline: float) -> None:
    """Fill `into`. The deadline is for all of it: an end that sends a byte now and then has stalled too."""
    done = 0
    while done < len(into):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ConnectorError("the other end has stalled")
        try:
            sock.settimeout(left_s)
            count = sock.recv_into(into[done:])
        except TimeoutError:
            continue
        except OSError as error:
            raise LostError(f"the connection broke: {error}") from error
        if not count:
            raise LostError("the other end closed the connection")
        done += count


def receive_text(sock: socket.socket, length: int, deadline: float) -> str:
    body = bytearray(length)
    receive_body(sock, memoryview(body), deadline)
    return body.decode(errors="replace")
