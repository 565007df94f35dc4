from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any

import pytest
from kv_transports import MAX_BLOCK_BYTES, Placed

from ostinato.connectors import tcp_client, wire
from ostinato.connectors.nixl import NixlReader
from ostinato.connectors.tcp import BlockClient, BlockServer
from ostinato.errors import ConfigError, ConnectorError

LONG_S = 60.0


def digest_of(index: int) -> bytes:
    return sha256(str(index).encode()).digest()


def data_of(index: int, num_bytes: int = 5000) -> bytes:
    return (digest_of(index) * (num_bytes // 32 + 1))[:num_bytes]


BLOCKS = {digest_of(index): data_of(index) for index in range(20)}
DIGESTS = list(BLOCKS)


class Got:
    """Keeps what comes; each block must be right."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []

    def __call__(self, digest: bytes, data: memoryview) -> None:
        assert bytes(data) == BLOCKS[digest]
        self.digests.append(digest)


def client_of(
    address: tuple[str, int], namespace: str = "n", timeout_s: float = LONG_S, nixl: Any | None = None
) -> BlockClient:
    reader = None if nixl is None else NixlReader(nixl, MAX_BLOCK_BYTES)
    return BlockClient(
        address, namespace=namespace, timeout_s=timeout_s, max_block_bytes=MAX_BLOCK_BYTES, reader=reader
    )


@contextmanager
def serving(
    get: Callable[[bytes], memoryview | bytes | None] = BLOCKS.get, nixl: Any | None = None, **options: object
) -> Iterator[tuple[BlockServer, BlockClient]]:
    """With `nixl` the blocks are copied to where the client reads them."""
    placed = None if nixl is None else Placed(get, nixl)
    server = BlockServer(placed or get, namespace="n", memory=placed and placed.shared, **options)  # type: ignore[arg-type]
    client = client_of(server.address, nixl=nixl)
    try:
        yield server, client
    finally:
        client.close()
        server.close()
        if placed is not None:
            placed.shared.close()


def test_blocks_come_in_order_and_whole(nixl: Any | None) -> None:
    with serving(nixl=nixl) as (_, client):
        got = Got()
        assert client.fetch(DIGESTS, got) == 20
        assert got.digests == DIGESTS
        assert client.last_error is None
        assert client.fetch([], got) == 0
        assert (client.num_sent, client.num_read) == ((0, 20) if nixl else (20, 0))


def test_the_prefix_ends_at_the_first_missing_block(nixl: Any | None) -> None:
    with serving(nixl=nixl) as (_, client):
        got = Got()
        assert client.fetch([*DIGESTS[:3], b"?" * 32, *DIGESTS[3:]], got) == 3
        assert client.fetch([b"?" * 32], got) == 0
        assert client.fetch(DIGESTS[5:7], got) == 2
        assert got.digests == DIGESTS[:3] + DIGESTS[5:7]
        assert client.last_error is None


@pytest.mark.parametrize("num_bytes", [0, 1, 4 * 2**20])
def test_blocks_of_any_size(num_bytes: int, nixl: Any | None) -> None:
    blocks = {digest_of(index)[:16]: data_of(index, num_bytes) for index in range(3)}
    got: dict[bytes, bytes] = {}
    with serving(lambda digest: memoryview(blocks[digest]), nixl) as (_, client):
        assert client.fetch(list(blocks), lambda digest, data: got.update({digest: bytes(data)})) == 3
    assert got == blocks


def test_a_list_longer_than_a_request(monkeypatch: pytest.MonkeyPatch, nixl: Any | None) -> None:
    monkeypatch.setattr(tcp_client, "MAX_DIGESTS", 6)
    with serving(nixl=nixl) as (_, client):
        got = Got()
        assert client.fetch(DIGESTS, got) == 20
        assert client.fetch([*DIGESTS[:6], b"?" * 32], got) == 6
        assert client.fetch(DIGESTS[:12], got) == 12
        assert got.digests == DIGESTS + DIGESTS[:6] + DIGESTS[:12]


def test_another_namespace_is_refused_by_name() -> None:
    with serving() as (server, _):
        other = client_of(server.address, namespace="m")
        with pytest.raises(ConnectorError, match="holds namespace 'n', not 'm'"):
            other.fetch(DIGESTS, Got())


def test_a_server_that_does_not_check_the_namespace_is_found_out() -> None:
    with (
        scripted(lambda sock: say(sock, wire.Kind.WELCOME, b"m")) as client,
        pytest.raises(ConnectorError, match="holds namespace 'm', not 'n'"),
    ):
        client.fetch(DIGESTS, Got())


def test_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    with pytest.raises(ConnectorError, match="no connection to a block server"):
        client_of(address).fetch(DIGESTS, Got())


def test_a_connection_too_many_is_refused_and_a_place_is_given_on() -> None:
    with serving(max_connections=1) as (server, client):
        assert client.fetch(DIGESTS[:1], Got()) == 1
        second = client_of(server.address)
        with pytest.raises(ConnectorError, match="all 1 connections of this server are taken"):
            second.fetch(DIGESTS, Got())
        client.close()
        wait_until(lambda: server._num_serving == 0)
        assert second.fetch(DIGESTS, Got()) == 20
        second.close()


def test_a_server_that_comes_back_is_found_by_the_next_call(nixl: Any | None) -> None:
    with serving(nixl=nixl) as (server, client):
        assert client.fetch(DIGESTS, Got()) == 20
        server.close()
        with pytest.raises(ConnectorError):
            client.fetch(DIGESTS, Got())
        again = BlockServer(BLOCKS.get, namespace="n", port=server.address[1])
        assert client.fetch(DIGESTS, Got()) == 20
        again.close()
        again = BlockServer(BLOCKS.get, namespace="n", port=server.address[1])
        assert client.fetch(DIGESTS, Got()) == 20, "the connection of before has ended, which is no failure"
        again.close()


def test_a_get_that_raises_is_a_missing_block(nixl: Any | None) -> None:
    def get(digest: bytes) -> bytes:
        if digest == DIGESTS[2]:
            raise RuntimeError("disk on fire")
        return BLOCKS[digest]

    with serving(get, nixl) as (_, client):
        assert client.fetch(DIGESTS, Got()) == 2
        assert client.fetch(DIGESTS[3:], Got()) == 17


def test_what_on_block_raises_comes_out_and_the_next_call_works(nixl: Any | None) -> None:
    def refuse(digest: bytes, data: memoryview) -> None:
        raise OSError("no room here")

    with serving(nixl=nixl) as (_, client):
        with pytest.raises(OSError, match="no room here"):
            client.fetch(DIGESTS, refuse)
        assert client.fetch(DIGESTS, Got()) == 20


def test_waits_until_blocks_appear(nixl: Any | None) -> None:
    blocks: dict[bytes, bytes] = {}
    asked = threading.Semaphore(0)

    def get(digest: bytes) -> bytes | None:
        asked.release()
        return blocks.get(digest)

    with serving(get, nixl) as (server, client):
        counts: list[int] = []
        got = Got()
        fetching = threading.Thread(target=lambda: counts.append(client.fetch(DIGESTS[:5], got, wait_s=LONG_S)))
        fetching.start()
        for digest in DIGESTS[:5]:
            assert asked.acquire(timeout=LONG_S)
            blocks[digest] = BLOCKS[digest]
            server.block_added()
        fetching.join(LONG_S)
        assert counts == [5]
        assert got.digests == DIGESTS[:5]


def test_a_wait_ends_at_its_limit_with_what_there_is(nixl: Any | None) -> None:
    with serving(nixl=nixl) as (_, client):
        assert client.fetch([*DIGESTS[:2], b"?" * 32], Got(), wait_s=0.05) == 2
        assert client.last_error is None


def test_closing_the_server_ends_a_wait(nixl: Any | None) -> None:
    asked = threading.Event()

    def get(digest: bytes) -> None:
        asked.set()

    with serving(get, nixl) as (server, client):
        done = threading.Event()

        def fetch() -> None:
            with suppress(ConnectorError):  # it may try once more, and nobody is there
                client.fetch(DIGESTS, Got(), wait_s=1000.0)
            done.set()

        threading.Thread(target=fetch, daemon=True).start()
        assert asked.wait(LONG_S)
        server.close()
        assert done.wait(LONG_S)


def test_closing_the_client_ends_a_wait_at_both_ends(nixl: Any | None) -> None:
    asked = threading.Event()

    def get(digest: bytes) -> None:
        asked.set()

    with serving(get, nixl) as (server, client):
        counts: list[int] = []
        fetching = threading.Thread(target=lambda: counts.append(client.fetch(DIGESTS, Got(), wait_s=1000.0)))
        fetching.start()
        assert asked.wait(LONG_S)
        client.close()
        fetching.join(LONG_S)
        assert counts == [0]
        wait_until(lambda: not server._connections)
        with pytest.raises(ConnectorError, match="closed"):
            client.fetch(DIGESTS, Got())


def test_a_client_may_be_closed_while_it_hands_on_a_block(monkeypatch: pytest.MonkeyPatch, nixl: Any | None) -> None:
    with serving(nixl=nixl) as (server, client):
        for size in (1, 6):
            monkeypatch.setattr(tcp_client, "MAX_DIGESTS", size)
            client = client_of(server.address, nixl=nixl)
            assert client.fetch(DIGESTS, lambda digest, data, client=client: client.close()) == 1  # type: ignore[misc]
            assert client.last_error is not None


def test_many_clients_at_once(nixl: Any | None) -> None:
    with serving(nixl=nixl) as (server, _):
        counts: list[int] = []

        def fetch() -> None:
            client = client_of(server.address, nixl=nixl)
            counts.extend(client.fetch(DIGESTS, Got()) for _ in range(5))
            client.close()

        threads = [threading.Thread(target=fetch) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        assert counts == [20] * 40


def test_options_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="namespace"):
        BlockServer(BLOCKS.get, namespace="")
    with pytest.raises(ConfigError, match="max_connections"):
        BlockServer(BLOCKS.get, namespace="n", max_connections=0)
    with pytest.raises(ConfigError, match="timeout_s"):
        BlockClient(("127.0.0.1", 1), namespace="n", timeout_s=0)
    with serving() as (server, client):
        with pytest.raises(ConnectorError, match="cannot listen"):
            BlockServer(BLOCKS.get, namespace="n", port=server.address[1])
        with pytest.raises(ConnectorError, match="same length"):
            client.fetch([b"a", b"bc"], Got())
        assert client.fetch(DIGESTS, Got()) == 20


# A server that misbehaves


def say(sock: socket.socket, kind: wire.Kind, body: bytes) -> None:
    wire.send_frame(sock, kind, body, b"", LONG_S)


def block_frame(request_id: int, index: int, checksum: bytes, data: bytes) -> bytes:
    body = wire.BLOCK.pack(request_id, index, checksum) + data
    return struct.pack("<4sBBHI", b"OSTb", 1, wire.Kind.BLOCK, 0, len(body)) + body


def frame_of(index: int, request_id: int = 1) -> bytes:
    data = memoryview(data_of(index))
    return block_frame(request_id, index, wire.block_checksum(digest_of(index), data), bytes(data))


def end_frame(request_id: int, count: int) -> bytes:
    return struct.pack("<4sBBHI", b"OSTb", 1, wire.Kind.END, 0, 8) + wire.END.pack(request_id, count)


def receive_frame(sock: socket.socket) -> None:
    _, length = wire.receive_head(sock, dict.fromkeys(wire.Kind, 2**20), time.monotonic() + LONG_S)
    wire.receive_text(sock, length, time.monotonic() + LONG_S)


@contextmanager
def scripted(script: Callable[[socket.socket], None], timeout_s: float = LONG_S) -> Iterator[BlockClient]:
    """A server that says what `script` says after each HELLO, and then hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                with sock:
                    try:
                        receive_frame(sock)
                        script(sock)
                        sock.shutdown(socket.SHUT_WR)
                        while sock.recv(4096):
                            pass
                    except (OSError, ConnectorError):
                        pass

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        client = client_of(listener.getsockname(), timeout_s=timeout_s)
        yield client
        client.close()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(LONG_S)


def answering(*frames: bytes) -> Callable[[socket.socket], None]:
    def script(sock: socket.socket) -> None:
        say(sock, wire.Kind.WELCOME, b"n")
        receive_frame(sock)
        for frame in frames:
            sock.sendall(frame)

    return script


def flipped(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


TOO_LONG = struct.pack("<4sBBHI", b"OSTb", 1, wire.Kind.BLOCK, 0, 2**32 - 1)
OTHER_VERSION = struct.pack("<4sBBHI", b"OSTb", 9, wire.Kind.BLOCK, 0, 5)
SHORT_END = struct.pack("<4sBBHI", b"OSTb", 1, wire.Kind.END, 0, 3) + b"abc"
SHORT_BLOCK = struct.pack("<4sBBHI", b"OSTb", 1, wire.Kind.BLOCK, 0, 3) + b"abc"
WRONG_END = end_frame(1, 7)
SAYS_NO = struct.pack("<4sBBHI", b"OSTb", 1, wire.Kind.REFUSED, 0, 4) + b"nope"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak this protocol"),
        (b"", "closed the connection"),
        (frame_of(2)[:-1], "closed the connection"),
        (frame_of(2)[:5], "closed the connection"),
        (flipped(frame_of(2), 3000), "does not match its checksum"),
        (flipped(frame_of(2), 30), "does not match its checksum"),
        (block_frame(1, 2, frame_of(3)[20:52], data_of(3)), "does not match its checksum"),
        (frame_of(3), "block 3 of answer 1 came, not 2"),
        (frame_of(2, request_id=8), "answer 8"),
        (TOO_LONG, "at most"),
        (OTHER_VERSION, "version 9"),
        (SHORT_END, "3 bytes"),
        (SHORT_BLOCK, "3 bytes"),
        (WRONG_END, "after 7 blocks"),
        (SAYS_NO, "the server says: nope"),
    ],
)
def test_a_bad_answer_keeps_the_good_blocks_before_it(bad: bytes, message: str) -> None:
    with scripted(answering(frame_of(0), frame_of(1), bad)) as client:
        got = Got()
        assert client.fetch(DIGESTS, got) == 2
        assert got.digests == DIGESTS[:2]
        assert message in str(client.last_error)


def test_a_flip_of_any_byte_of_a_frame_gives_no_wrong_data() -> None:
    data = b"twelve bytes"
    frame = block_frame(1, 0, wire.block_checksum(DIGESTS[0], memoryview(data)), data)
    for at in range(len(frame)):
        got: list[bytes] = []
        with scripted(answering(flipped(frame, at))) as client:
            client.fetch(DIGESTS[:1], lambda _, view, got=got: got.append(bytes(view)))  # type: ignore[misc]
        assert got in ([], [data]), at
        assert got == [] or 6 <= at < 8, "only the two bytes that mean nothing may differ"


def test_a_client_recovers_at_the_next_call() -> None:
    answers = [[frame_of(0), flipped(frame_of(1), 99)], [frame_of(0, 2), frame_of(1, 2), end_frame(2, 2)]]
    with scripted(lambda sock: answering(*answers.pop(0))(sock)) as client:
        assert client.fetch(DIGESTS[:2], Got()) == 1
        assert client.last_error is not None
        assert client.fetch(DIGESTS[:2], Got()) == 2
        assert client.last_error is None


def test_a_server_that_stalls_costs_the_time_limit() -> None:
    let_go = threading.Event()

    def script(sock: socket.socket) -> None:
        answering(frame_of(0), frame_of(1)[:100])(sock)
        let_go.wait(LONG_S)

    with scripted(script, timeout_s=1.0) as client:
        # a machine that is slow enough may not get the first block in time either
        assert client.fetch(DIGESTS, Got()) in (0, 1)
        assert "stalled" in str(client.last_error)
        let_go.set()


def test_a_server_that_says_nothing_at_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ConnectorError, match="stalled"):
        client_of(listener.getsockname(), timeout_s=0.1).fetch(DIGESTS, Got())


# A client that misbehaves


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"does not speak this protocol"),
        (struct.pack("<4sBBHI", b"OSTb", 2, 1, 0, 1) + b"n", b"version 2"),
        (struct.pack("<4sBBHI", b"OSTb", 1, 4, 0, 1) + b"n", b"HELLO was due"),
        (struct.pack("<4sBBHI", b"OSTb", 1, 77, 0, 1) + b"n", b"HELLO was due"),
        (struct.pack("<4sBBHI", b"OSTb", 1, 1, 0, 2**31), b"at most 1024"),
        (struct.pack("<4sBBHI", b"OSTb", 1, 1, 0, 2) + b"\xff\xfe", b"holds namespace 'n'"),
    ],
)
def test_a_client_that_sends_rubbish_is_told_so(sent: bytes, message: bytes) -> None:
    with serving() as (server, client):
        with socket.create_connection(server.address, LONG_S) as sock:
            sock.sendall(sent)
            heard = b""
            while piece := sock.recv(4096):
                heard += piece
        assert message in heard
        assert client.fetch(DIGESTS, Got()) == 20


@pytest.mark.parametrize(
    "body",
    [
        b"",
        struct.pack("<IIHH", 1, 0, 2, 32) + b"x" * 63,
        struct.pack("<IIHH", 1, 0, 0, 32),
        struct.pack("<IIHH", 1, 0, 1, 0),
        struct.pack("<IIHH", 1, 0, 1, 65) + b"x" * 65,
        struct.pack("<IIHH", 1, 0, 4097, 1) + b"x" * 4097,
    ],
)
def test_a_request_that_does_not_add_up_is_refused(body: bytes) -> None:
    with serving() as (server, client):
        with socket.create_connection(server.address, LONG_S) as sock:
            say(sock, wire.Kind.HELLO, b"n")
            receive_frame(sock)
            say(sock, wire.Kind.FETCH, body)
            kind, length = wire.receive_head(sock, {wire.Kind.REFUSED: 1024}, time.monotonic() + LONG_S)
            assert kind is wire.Kind.REFUSED
            assert wire.receive_text(sock, length, time.monotonic() + LONG_S).startswith("FETCH")
        assert client.fetch(DIGESTS, Got()) == 20


def test_a_client_that_stops_in_the_middle_loses_its_place() -> None:
    with serving(timeout_s=1.0, max_connections=1) as (server, _):
        with socket.create_connection(server.address, LONG_S) as sock:
            say(sock, wire.Kind.HELLO, b"n")
            receive_frame(sock)
            sock.sendall(b"OST")
            kind, _ = wire.receive_head(sock, {wire.Kind.REFUSED: 1024}, time.monotonic() + LONG_S)
            assert kind is wire.Kind.REFUSED
        wait_until(lambda: not server._connections)


def wait_until(holds: Callable[[], bool]) -> None:
    due = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < due
        time.sleep(0.01)


# Two processes

SERVE = """
import sys
from hashlib import sha256
from ostinato.connectors.tcp import BlockServer
digests = [sha256(str(index).encode()).digest() for index in range(20)]
blocks = {digest: (digest * 200)[:5000] for digest in digests}
server = BlockServer(blocks.get, namespace="n")
print(server.address[1], flush=True)
sys.stdin.read()
"""


def test_two_processes() -> None:
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    try:
        client = client_of(("127.0.0.1", int(process.stdout.readline())))
        got = Got()
        assert client.fetch(DIGESTS, got) == 20
        assert got.digests == DIGESTS
        process.kill()
        process.wait(LONG_S)
        with pytest.raises(ConnectorError):
            client.fetch(DIGESTS, got)
        client.close()
    finally:
        process.kill()
        process.wait(LONG_S)
        process.stdin.close()
        process.stdout.close()
