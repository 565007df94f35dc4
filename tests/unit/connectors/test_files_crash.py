"""Writers that are killed. `python tests/unit/connectors/test_files_crash.py 200` kills so many at random moments."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path

import pytest

from ostinato.connectors.block_file import file_bytes
from ostinato.connectors.files import BlockFiles
from ostinato.connectors.folder_locks import TempFile

NUM_BYTES = 32 * 1024
NUM_BLOCKS = 24
FILE_BYTES = file_bytes(bytes(32), "n", NUM_BYTES)
MAX_BYTES = 8 * FILE_BYTES
ROUNDS = 15


def digest_of(index: int) -> bytes:
    return sha256(str(index).encode()).digest()


def data_of(index: int) -> bytes:
    return digest_of(index) * (NUM_BYTES // 32)


def open_files(folder: Path) -> BlockFiles:
    return BlockFiles(folder, namespace="n", max_bytes=MAX_BYTES)


def leftovers(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


def check(folder: Path) -> int:
    """What must hold after any crash, with no other writer alive; returns the number of blocks."""
    assert sum(path.stat().st_size for path in folder.rglob("*.safetensors")) <= MAX_BYTES
    paths = set(folder.rglob("*.safetensors"))
    files = open_files(folder)
    assert leftovers(folder) == []
    found = {index: data for index in range(NUM_BLOCKS) if (data := files.get(digest_of(index))) is not None}
    assert all(data == data_of(index) for index, data in found.items())
    assert len(found) == len(files) == len(paths), "every file was whole, and none was removed as damaged"
    assert files.num_bytes == len(found) * FILE_BYTES
    return len(found)


WRITER = """
import random, sys
from tests.unit.connectors.test_files_crash import *
files, chance = open_files(Path(sys.argv[1])), random.Random(sys.argv[2])
print("ready", flush=True)
while True:
    index = chance.randrange(NUM_BLOCKS)
    files.put(digest_of(index), data_of(index))
    files.get(digest_of(chance.randrange(NUM_BLOCKS)))
"""


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root), str(root / "src")])
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(60)
    assert process.stdout
    process.stdout.close()


def kill_writers(folder: Path, rounds: int, seed: int) -> tuple[int, int]:
    """Returns how many of the killed left something behind, and how many blocks were found in all."""
    chance = random.Random(seed)
    num_leftovers = num_found = 0
    for number in range(rounds):
        writer = start(WRITER, str(folder), f"{seed} {number}")
        try:
            assert writer.stdout and writer.stdout.readline() == "ready\n"
            time.sleep(chance.uniform(0, 0.05))
        finally:
            kill(writer)
        num_leftovers += bool(leftovers(folder))
        num_found += check(folder)
    return num_leftovers, num_found


def test_a_writer_killed_at_random_moments(tmp_path: Path) -> None:
    kill_writers(tmp_path, ROUNDS, seed=1)


def two_puts_dying_at(folder: Path, step: int) -> None:
    """In a process of its own: opens a full cache and puts two blocks, and is killed before its call number `step`."""
    num_calls = 0

    def counted(function):  # type: ignore[no-untyped-def]
        def call(*arguments, **options):  # type: ignore[no-untyped-def]
            nonlocal num_calls
            num_calls += 1
            if num_calls == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    write = os.write
    for name in ("open", "close", "fsync", "utime", "replace", "unlink", "pread", "pwrite", "stat", "mkdir", "scandir"):
        setattr(os, name, counted(getattr(os, name)))
    os.write = counted(lambda fd, data: write(fd, data[:8192]))
    fcntl.flock = counted(fcntl.flock)
    files = open_files(folder)
    assert files.put(digest_of(20), data_of(20))
    assert files.put(digest_of(21), data_of(21))


def test_a_writer_killed_before_each_of_its_system_calls(tmp_path: Path) -> None:
    num_leftovers = 0
    for step in range(1, 1000):
        folder = tmp_path / str(step)
        files = open_files(folder)
        for index in range(8):
            files.put(digest_of(index), data_of(index))
        child = os.fork()
        if child == 0:
            try:
                two_puts_dying_at(folder, step)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        num_leftovers += bool(leftovers(folder))
        assert check(folder) in (7, 8), step
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            assert set(range(2, 8)) | {20, 21} == {i for i in range(NUM_BLOCKS) if digest_of(i) in open_files(folder)}
            break
    assert step > 30 and num_leftovers > 10, "or the steps were not those that it was meant for"


HOLDER = """
import sys
from tests.unit.connectors.test_files_crash import *
temp = TempFile(Path(sys.argv[1]))
temp.write(b"not yet all")
print("ready", flush=True)
time.sleep(1000)
"""


def test_a_live_writers_file_is_left_alone_until_it_dies(tmp_path: Path) -> None:
    open_files(tmp_path).put(digest_of(1), data_of(1))
    (folder,) = (path for path in (tmp_path / "n").iterdir() if path.is_dir())
    writer = start(HOLDER, str(folder))
    try:
        assert writer.stdout and writer.stdout.readline() == "ready\n"
        open_files(tmp_path)
        assert len(leftovers(tmp_path)) == 1
    finally:
        kill(writer)
    open_files(tmp_path)
    assert leftovers(tmp_path) == []


def test_a_file_taken_for_a_leftover_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    taken: list[Path] = []

    def slow(fd: int, how: int) -> None:
        if len(taken) < 2:
            taken.extend(leftovers(tmp_path))
            taken[-1].unlink()
        flock(fd, how)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", slow)
        temp = TempFile(tmp_path)
    with temp:
        assert len(taken) == 2 and temp.path not in taken
        temp.write(b"data")
        temp.commit(tmp_path / "done", 12345)
    assert [path.name for path in tmp_path.iterdir()] == ["done"]
    assert (tmp_path / "done").read_bytes() == b"data"


SHARER = """
import sys
from tests.unit.connectors.test_files_crash import *
files = open_files(Path(sys.argv[1]))
print("ready", flush=True)
for step in range(60):
    index = (step * 5 + step // 7) % NUM_BLOCKS
    assert files.put(digest_of(index), data_of(index))
    assert files.get(digest_of(index)) in (None, data_of(index))
print("done", flush=True)
"""


def test_two_processes_share_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sharers = [start(SHARER, str(tmp_path)) for _ in range(2)]
    try:
        files = open_files(tmp_path)
        for step in range(60):
            index = step * 7 % NUM_BLOCKS
            assert files.put(digest_of(index), data_of(index))
            assert files.get(digest_of(index)) in (None, data_of(index))
        for sharer in sharers:
            assert sharer.stdout and sharer.stdout.read() == "ready\ndone\n"
            assert sharer.wait(60) == 0
    finally:
        for sharer in sharers:
            kill(sharer)
    assert not caplog.records
    check(tmp_path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        started = time.monotonic()
        killed = int(sys.argv[1])
        left, found = kill_writers(Path(scratch), killed, seed=random.randrange(10**6))
        print(f"{killed} writers killed, {left} left a file half made, {found} blocks found right, none wrong")
        print(f"{time.monotonic() - started:.0f} s")
