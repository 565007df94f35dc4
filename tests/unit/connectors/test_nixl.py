"""What only reads of another's memory can get wrong: a block that goes while it is read, reads that fail or come late,
an end without NIXL."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from kv_transports import StandIn, needs_nixl

from ostinato.connectors import wire
from ostinato.connectors.loans import MAX_LOANS
from ostinato.connectors.nixl import NixlMemory, NixlReader, choose_nixl
from ostinato.connectors.published import PublishedBlocks
from ostinato.connectors.remote import RemoteBlocks
from ostinato.connectors.tcp import BlockClient, BlockServer
from ostinato.connectors.tcp_client import MAX_FAILED_READS
from ostinato.errors import ConfigError, ConnectorError

LONG_S = 60.0
SIZE = 4096
DIGESTS = [sha256(str(index).encode()).digest() for index in range(2 * MAX_LOANS + 3)]


def data_of(digest: bytes) -> bytes:
    return digest * (SIZE // 32)


class Got:
    """Keeps what comes; each block must be right."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []

    def __call__(self, digest: bytes, data: memoryview) -> None:
        assert bytes(data) == data_of(digest)
        self.digests.append(digest)


@contextmanager
def published(nixl: Any | None, num_blocks: int = len(DIGESTS), timeout_s: float = LONG_S) -> Iterator[PublishedBlocks]:
    """With the first `num_blocks` of DIGESTS, and room for no more. Its server has NIXL if `nixl` is given."""
    blocks = PublishedBlocks(num_blocks * SIZE, SIZE)
    for digest in DIGESTS[:num_blocks]:
        assert blocks.write(digest, memoryview(data_of(digest)))
    blocks.shared = None if nixl is None else NixlMemory(nixl, blocks.memory)
    blocks.server = BlockServer(
        blocks.get, namespace="n", done=blocks.done, memory=blocks.shared, timeout_s=timeout_s
    )  # fmt: skip
    try:
        yield blocks
    finally:
        blocks.close()


def client_of(
    blocks: PublishedBlocks, nixl: Any, said: list[str] | None = None, timeout_s: float = LONG_S
) -> BlockClient:
    assert blocks.server is not None
    return BlockClient(
        blocks.server.address,
        namespace="n",
        timeout_s=timeout_s,
        max_block_bytes=SIZE,
        reader=NixlReader(nixl, SIZE),
        on_fallback=None if said is None else said.append,
    )


@contextmanager
def located(blocks: PublishedBlocks, digests: list[bytes]) -> Iterator[socket.socket]:
    """A client that has asked where blocks lie, and reads no answer yet."""
    assert blocks.server is not None
    with socket.create_connection(blocks.server.address, LONG_S) as sock:
        wire.send_frame(sock, wire.Kind.HELLO, b"n", b"", LONG_S)
        receive(sock, wire.Kind.WELCOME)
        wire.send_frame(sock, wire.Kind.LOCATE, wire.pack_fetch(7, 0.0, digests), b"", LONG_S)
        yield sock


def receive(sock: socket.socket, kind: wire.Kind) -> bytes:
    came, length = wire.receive_head(sock, dict.fromkeys(wire.Kind, 2**20), time.monotonic() + LONG_S)
    body = bytearray(length)
    wire.receive_body(sock, memoryview(body), time.monotonic() + LONG_S)
    assert came is kind, bytes(body)
    return bytes(body)


def until(holds: Callable[[], bool]) -> None:
    due = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < due
        time.sleep(0.01)


# Which transport


def test_without_nixl_bytes_go_over_tcp(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    assert choose_nixl("auto") is None
    assert choose_nixl("tcp") is None
    assert not caplog.records


def test_nixl_that_is_asked_for_and_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    with pytest.raises(ConfigError, match="pip install nixl-cu13"):
        choose_nixl("nixl")


def test_nixl_that_is_broken_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(name: str) -> ModuleType:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr("ostinato.connectors.nixl.import_module", fail)
    assert choose_nixl("auto") is None
    assert "libcudart.so.13" in caplog.text
    with pytest.raises(ConfigError, match=r"libcudart\.so\.13"):
        choose_nixl("nixl")


def test_importing_nixl_leaves_logging_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    nixl_log = logging.getLogger("nixl")
    before = nixl_log.level

    def load(name: str) -> ModuleType:
        logging.raiseExceptions = False
        nixl_log.setLevel(logging.INFO)
        return ModuleType(name)

    monkeypatch.setattr("ostinato.connectors.nixl.import_module", load)
    try:
        assert choose_nixl("auto") is not None
        assert logging.raiseExceptions
        assert nixl_log.level == logging.WARNING
    finally:
        nixl_log.setLevel(before)


@pytest.mark.parametrize("transport", ["rdma", "", None, 3])
def test_a_transport_that_there_is_not(transport: object) -> None:
    with pytest.raises(ConfigError, match="must be auto, tcp or nixl"):
        choose_nixl(transport)


def test_a_server_without_nixl_sends_blocks_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with published(None) as blocks:
        assert blocks.server is not None
        remote = RemoteBlocks(
            blocks.server.address,
            namespace="n",
            block_bytes=SIZE,
            num_connections=2,
            timeout_s=LONG_S,
            wait_s=0.01,
            retry_s=1.0,
            make_reader=lambda: NixlReader(StandIn(), SIZE),
        )
        for _ in range(2):
            came: list[bytes] = []
            remote.read(DIGESTS[:3], lambda data, came=came: came.append(bytes(data)) is None)  # type: ignore[misc]
            assert came == [data_of(digest) for digest in DIGESTS[:3]]
        assert remote.fetched() == {"tcp": 6, "nixl": 0}
        remote.close()
    assert [record.message for record in caplog.records] == [
        "KV blocks come over TCP, not by NIXL: the server has no NIXL"
    ]


def test_a_client_without_nixl_is_sent_blocks() -> None:
    with published(StandIn()) as blocks:
        assert blocks.server is not None
        client = BlockClient(blocks.server.address, namespace="n", timeout_s=LONG_S)
        assert client.fetch(DIGESTS, Got()) == len(DIGESTS)
        assert (client.num_sent, client.num_read) == (len(DIGESTS), 0)
        client.close()


def test_a_client_that_has_no_agent_is_sent_blocks() -> None:
    class Broken(StandIn):
        def nixl_agent(self, name: str, config: None) -> Any:
            raise RuntimeError("no plugins")

    said: list[str] = []
    with published(StandIn()) as blocks:
        client = client_of(blocks, Broken(), said)
        assert client.fetch(DIGESTS[:2], Got()) == 2
        assert (client.num_sent, client.num_read) == (2, 0)
        client.close()
    assert len(said) == 1
    assert "no plugins" in said[0]


def test_asking_a_server_without_nixl_where_blocks_lie() -> None:
    with published(None) as blocks, located(blocks, DIGESTS[:1]) as sock:
        assert receive(sock, wire.Kind.REFUSED) == b"LOCATE: this server only sends blocks"


# Blocks that are being read


def test_a_block_stays_until_the_client_has_it() -> None:
    new = b"n" * 32
    with published(StandIn(), num_blocks=1) as blocks, located(blocks, DIGESTS[:1]) as sock:
        *_, address, num_bytes = wire.PLACE.unpack(receive(sock, wire.Kind.PLACE))
        assert (address, num_bytes) == (blocks.memory.ctypes.data, SIZE)
        assert not blocks.write(new, memoryview(data_of(new))), "there is no room but that of the block"
        assert bytes(blocks.memory) == data_of(DIGESTS[0])
        wire.send_frame(sock, wire.Kind.DONE, wire.DONE.pack(7, 1), b"", LONG_S)
        assert wire.END.unpack(receive(sock, wire.Kind.END)) == (7, 1)
        assert blocks.write(new, memoryview(data_of(new)))
        assert bytes(blocks.memory) == data_of(new)


def test_the_longest_unused_block_goes() -> None:
    blocks = PublishedBlocks(3 * SIZE + 1, SIZE)
    for digest in DIGESTS[:3]:
        assert blocks.write(digest, memoryview(data_of(digest)))
    assert blocks.write(DIGESTS[0], memoryview(data_of(DIGESTS[0])))  # it is there: a use, as `has` and `get` are
    assert blocks.has(DIGESTS[1])
    assert blocks.write(DIGESTS[3], memoryview(data_of(DIGESTS[3])))
    assert [blocks.has(digest) for digest in DIGESTS[:4]] == [True, True, False, True]
    assert not PublishedBlocks(SIZE - 1, SIZE).write(DIGESTS[0], memoryview(data_of(DIGESTS[0])))


def test_a_block_is_given_up_with_the_connection() -> None:
    new = b"n" * 32
    with published(StandIn(), num_blocks=1) as blocks:
        with located(blocks, DIGESTS[:1]) as sock:
            receive(sock, wire.Kind.PLACE)
            assert not blocks.write(new, memoryview(data_of(new)))
        until(lambda: blocks.write(new, memoryview(data_of(new))))


def test_a_client_that_keeps_blocks_for_too_long_loses_them() -> None:
    new = b"n" * 32
    with published(StandIn(), num_blocks=1, timeout_s=0.3) as blocks, located(blocks, DIGESTS[:1]) as sock:
        receive(sock, wire.Kind.PLACE)
        assert b"stalled, with 1 blocks" in receive(sock, wire.Kind.REFUSED)
        assert blocks.write(new, memoryview(data_of(new)))


def test_a_client_holds_no_more_than_so_many_blocks() -> None:
    stand_in = StandIn()
    with published(stand_in) as blocks, located(blocks, DIGESTS) as sock:
        for index in range(MAX_LOANS):
            assert wire.PLACE.unpack(receive(sock, wire.Kind.PLACE))[:2] == (7, index)
        progressed = stand_in.num_progressed
        until(lambda: stand_in.num_progressed > progressed + 5)  # it drives the client's reads meanwhile
        sock.settimeout(0)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
        sock.settimeout(LONG_S)
        wire.send_frame(sock, wire.Kind.DONE, wire.DONE.pack(7, 2), b"", LONG_S)
        for index in range(MAX_LOANS, MAX_LOANS + 2):
            assert wire.PLACE.unpack(receive(sock, wire.Kind.PLACE))[:2] == (7, index)


@pytest.mark.parametrize("body", [wire.DONE.pack(7, 0), wire.DONE.pack(7, 3), wire.DONE.pack(8, 1), b"", b"123"])
def test_a_client_that_says_nonsense_is_told_so(body: bytes) -> None:
    with published(StandIn(), num_blocks=2) as blocks:
        with located(blocks, DIGESTS[:2]) as sock:
            receive(sock, wire.Kind.PLACE)
            receive(sock, wire.Kind.PLACE)
            wire.send_frame(sock, wire.Kind.DONE, body, b"", LONG_S)
            assert receive(sock, wire.Kind.REFUSED).startswith(b"DONE")
        until(lambda: not blocks._index._holds)


def test_a_server_can_close_while_blocks_are_being_read() -> None:
    with published(StandIn()) as blocks, located(blocks, DIGESTS) as sock:
        receive(sock, wire.Kind.PLACE)
        closing = threading.Thread(target=blocks.close)
        closing.start()
        closing.join(LONG_S)
        assert not closing.is_alive()
        assert not blocks._index._holds


def test_all_is_let_go_after_an_answer(nixl: Any | None) -> None:
    with published(nixl) as blocks:
        assert blocks.server is not None
        client = (
            client_of(blocks, nixl) if nixl else BlockClient(blocks.server.address, namespace="n", timeout_s=LONG_S)
        )
        got = Got()
        assert client.fetch([*DIGESTS, b"?" * 32], got) == len(DIGESTS)
        assert got.digests == DIGESTS
        assert client.num_read == (len(DIGESTS) if nixl else 0)
        assert not blocks._index._holds
        client.close()


# Reads that fail


def failing(blocks: PublishedBlocks, stand_in: StandIn, timeout_s: float = LONG_S) -> tuple[list[bytes], str]:
    """What came of three blocks, and why no more. The next call gets all."""
    client = client_of(blocks, stand_in, timeout_s=timeout_s)
    got = Got()
    assert client.fetch(DIGESTS[:3], got) == len(got.digests)
    failure = str(client.last_error)
    stand_in.states, stand_in.before_read = [], lambda: None
    assert client.fetch(DIGESTS[:3], Got()) == 3
    assert client.last_error is None
    until(lambda: not blocks._index._holds)
    client.close()
    return got.digests, failure


def test_a_read_that_fails_is_a_missing_block() -> None:
    stand_in = StandIn()
    stand_in.states = ["PROC", "PROC", "DONE", "PROC", "ERR"]
    with published(stand_in) as blocks:
        came, failure = failing(blocks, stand_in)
    assert came == DIGESTS[:1]
    assert "ended in state ERR" in failure


def test_a_read_that_raises_is_a_missing_block() -> None:
    class DisconnectError(Exception):
        """As the bindings' own, which have no base of theirs."""

    def fail() -> None:
        raise DisconnectError("NIXL_ERR_REMOTE_DISCONNECT")

    stand_in = StandIn()
    stand_in.before_read = fail
    with published(stand_in) as blocks:
        came, failure = failing(blocks, stand_in)
    assert came == []
    assert "NIXL_ERR_REMOTE_DISCONNECT" in failure


def test_a_read_that_stalls_costs_the_time_limit() -> None:
    stand_in = StandIn()
    stand_in.states = ["DONE"] + ["PROC"] * 1_000_000
    with published(stand_in) as blocks:
        came, failure = failing(blocks, stand_in, timeout_s=0.5)
    assert came == DIGESTS[:1]
    assert "stalled" in failure


@pytest.mark.parametrize("fails", ["stalls", "raises"])
def test_a_read_that_failed_has_no_agent_that_could_still_write(fails: str) -> None:
    def fail() -> None:
        if fails == "raises":
            raise RuntimeError("NIXL_ERR_BACKEND")

    stand_in = StandIn()
    stand_in.states, stand_in.before_read = ["PROC"] * 1_000_000, fail
    reader = NixlReader(stand_in, SIZE)
    reader.join(b"peer")
    assert len(stand_in.agents) == 1
    source = np.zeros(SIZE, np.uint8)
    with pytest.raises(ConnectorError) as error:
        reader.read(source.ctypes.data, SIZE, time.monotonic() + 0.01, lambda: False)
    assert not stand_in.agents, "and not because somebody has let go of the error"
    assert error.value is not None
    with pytest.raises(ConnectorError, match="has not joined"):
        reader.read(source.ctypes.data, SIZE, time.monotonic() + LONG_S, lambda: False)


def test_a_read_that_comes_late_gets_no_wrong_block() -> None:
    """Another block lies there by now: whole, and right for its own name."""
    stand_in = StandIn()
    with published(stand_in) as blocks:
        right = bytes(blocks.memory)

        def overwrite() -> None:
            blocks.memory[:SIZE] = np.frombuffer(data_of(DIGESTS[5]), np.uint8)

        stand_in.before_read = overwrite
        client = client_of(blocks, stand_in)
        got = Got()
        assert client.fetch(DIGESTS[:3], got) == 0
        assert "does not match its checksum" in str(client.last_error)
        stand_in.before_read = lambda: None
        blocks.memory[:] = np.frombuffer(right, np.uint8)
        assert client.fetch(DIGESTS[:3], got) == 3
        client.close()


def test_two_hosts_that_cannot_read_from_each_other_use_tcp() -> None:
    stand_in, said = StandIn(), []
    stand_in.states = ["ERR"] * 100
    with published(stand_in) as blocks:
        client = client_of(blocks, stand_in, said)
        for _ in range(MAX_FAILED_READS):
            assert not said
            assert client.fetch(DIGESTS[:3], Got()) == 0
            assert client.last_error is not None
        assert client.fetch(DIGESTS[:3], Got()) == 3
        assert (client.num_sent, client.num_read) == (3, 0)
        client.close()
    assert len(said) == 1
    assert "ended in state ERR" in said[0]


def test_closing_the_client_ends_a_read() -> None:
    stand_in, reading = StandIn(), threading.Event()
    stand_in.states = ["PROC"] * 10_000_000
    stand_in.before_read = reading.set
    with published(stand_in) as blocks:
        client, counts = client_of(blocks, stand_in), []
        fetching = threading.Thread(target=lambda: counts.append(client.fetch(DIGESTS, Got())))
        fetching.start()
        assert reading.wait(LONG_S)
        client.close()
        fetching.join(LONG_S)
        assert counts == [0]
        until(lambda: not blocks._index._holds)


def test_a_block_that_is_too_large_is_not_read() -> None:
    stand_in = StandIn()
    with published(stand_in) as blocks:
        assert blocks.server is not None
        reader = NixlReader(stand_in, SIZE - 1)
        client = BlockClient(
            blocks.server.address, namespace="n", timeout_s=LONG_S, max_block_bytes=SIZE - 1, reader=reader
        )
        assert client.fetch(DIGESTS[:1], Got()) == 0
        assert "at most 4095" in str(client.last_error)
        client.close()


def test_only_its_own_memory_is_offered() -> None:
    memory = NixlMemory(StandIn(), np.zeros(100, np.uint8))
    with pytest.raises(ConnectorError, match="does not lie"):
        memory.address(np.zeros(100, np.uint8).data)
    memory.close()


def test_memory_is_let_go_once() -> None:
    stand_in = StandIn()
    memory = NixlMemory(stand_in, np.zeros(100, np.uint8))
    assert stand_in.registered == 1
    memory.close()
    memory.close()
    memory.progress()
    assert (stand_in.registered, stand_in.num_progressed) == (0, 0)


# Two processes, and NIXL itself

SERVE = """
import sys
from hashlib import sha256
from ostinato.connectors.nixl import NixlMemory, choose_nixl
from ostinato.connectors.published import PublishedBlocks
from ostinato.connectors.tcp import BlockServer
blocks = PublishedBlocks(35 * 4096, 4096)
for index in range(35):
    digest = sha256(str(index).encode()).digest()
    blocks.write(digest, memoryview(digest * 128))
blocks.shared = NixlMemory(choose_nixl("nixl"), blocks.memory)
blocks.server = BlockServer(blocks.get, namespace="n", done=blocks.done, memory=blocks.shared)
print("port", blocks.server.address[1], flush=True)
for line in sys.stdin:
    if line == "overwrite\\n":
        blocks.memory[:] = 0
    else:
        blocks.shared.close()
        blocks.shared.progress = lambda: None
    print("did", flush=True)
"""


@needs_nixl
@pytest.mark.parametrize("tls", [None, "tcp"], ids=["any", "tcp"])
def test_two_processes(tls: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over what UCX takes on one host, and over its TCP, which needs the producer's help for a read."""
    if tls is not None:
        monkeypatch.setenv("UCX_TLS", tls)
    with producer() as (process, say):
        client = client_at(process, choose_nixl("nixl"))
        for _ in range(3):
            got = Got()
            assert client.fetch(DIGESTS, got) == len(DIGESTS)
            assert got.digests == DIGESTS
        assert (client.num_sent, client.num_read) == (0, 3 * len(DIGESTS))
        say("withdraw")
        count = client.fetch(DIGESTS, Got())  # the memory is still there, so some may come until UCX notices
        assert count == len(DIGESTS) or "NIXL" in str(client.last_error)
        process.kill()
        process.wait(LONG_S)
        with pytest.raises(ConnectorError):
            client.fetch(DIGESTS, Got())
        client.close()


@needs_nixl
def test_a_read_of_another_process_that_comes_late() -> None:
    class Late(NixlReader):
        def read(self, address: int, num_bytes: int, due: float, stopped: Callable[[], bool]) -> memoryview:
            say("overwrite")
            return super().read(address, num_bytes, due, stopped)

    with producer() as (process, say):
        client = client_at(process, choose_nixl("nixl"), Late)
        assert client.fetch(DIGESTS, Got()) == 0
        assert "does not match its checksum" in str(client.last_error)
        client.close()


@needs_nixl
def test_a_process_that_was_stopped() -> None:
    """Its blocks lie there still; what it does not send does not come, and what cannot be read is missing."""
    with producer() as (process, _):
        client = client_at(process, choose_nixl("nixl"), timeout_s=1.0)
        assert client.fetch(DIGESTS[:2], Got()) in (0, 1, 2)
        process.send_signal(signal.SIGSTOP)
        assert client.fetch(DIGESTS, Got()) == 0
        assert client.last_error is not None
        process.send_signal(signal.SIGCONT)
        client.close()


@contextmanager
def producer() -> Iterator[tuple[subprocess.Popen[str], Callable[[str], None]]]:
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    stdin, stdout = process.stdin, process.stdout

    def say(what: str) -> None:
        stdin.write(what + "\n")
        stdin.flush()
        while stdout.readline() != "did\n":
            assert process.poll() is None

    try:
        yield process, say
    finally:
        process.kill()
        process.wait(LONG_S)
        stdin.close()
        stdout.close()


def client_at(
    process: subprocess.Popen[str], nixl: Any, reader: type[NixlReader] = NixlReader, timeout_s: float = LONG_S
) -> BlockClient:
    assert process.stdout
    line = process.stdout.readline().split()
    assert line[:1] == ["port"], line
    address = ("127.0.0.1", int(line[1]))
    return BlockClient(
        address, namespace="n", timeout_s=timeout_s, max_block_bytes=SIZE, reader=reader(nixl, SIZE)
    )  # fmt: skip
