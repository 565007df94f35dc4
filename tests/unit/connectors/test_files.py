from __future__ import annotations

import errno
import logging
import os
import threading
from collections import OrderedDict
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from ostinato.connectors.block_file import block_header, file_bytes
from ostinato.connectors.files import BlockFiles, namespace_of
from ostinato.errors import ConfigError

NUM_BYTES = 100


def digest_of(index: int) -> bytes:
    return sha256(str(index).encode()).digest()


def data_of(index: int, num_bytes: int = NUM_BYTES) -> bytes:
    return (sha256(b"data of %d" % index).digest() * (num_bytes // 32 + 1))[:num_bytes]


FILE_BYTES = file_bytes(digest_of(0), "n", NUM_BYTES)


def open_files(folder: Path, max_blocks: float = 100, namespace: str = "n") -> BlockFiles:
    return BlockFiles(folder, namespace=namespace, max_bytes=int(max_blocks * FILE_BYTES), fsync=False)


def path_of(folder: Path, digest: bytes, namespace: str = "n") -> Path:
    return folder / namespace / digest.hex()[:2] / f"{digest.hex()}.safetensors"


def held(files: BlockFiles, num: int = 20) -> list[int]:
    return [index for index in range(num) if digest_of(index) in files]


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


@pytest.mark.parametrize("fsync", [True, False])
@pytest.mark.parametrize("num_bytes", [0, 1, 32 * 1024, 4 * 2**20])
def test_what_is_put_is_got(tmp_path: Path, num_bytes: int, fsync: bool) -> None:
    files = BlockFiles(tmp_path, namespace="n", max_bytes=2**24, fsync=fsync)
    data = data_of(1, num_bytes)
    assert files.get(digest_of(1)) is None
    assert files.put(digest_of(1), memoryview(data))
    assert files.get(digest_of(1)) == data
    assert digest_of(1) in files and digest_of(2) not in files
    assert (len(files), files.num_bytes) == (1, bytes_in(tmp_path))
    files.close()
    again = BlockFiles(tmp_path, namespace="n", max_bytes=2**24)
    assert again.get(digest_of(1)) == data
    assert (len(again), again.num_bytes) == (1, bytes_in(tmp_path))


def test_digests_of_16_bytes_and_views_of_other_types(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    view = memoryview(bytes(range(64))).cast("i", (4, 4))
    assert files.put(b"0123456789abcdef", view)
    assert files.get(b"0123456789abcdef") == bytes(range(64))


def test_the_official_package_reads_the_file(tmp_path: Path) -> None:
    open_files(tmp_path).put(digest_of(1), data_of(1))
    path = path_of(tmp_path, digest_of(1))
    assert load_file(path)["kv"].tobytes() == data_of(1)
    with safe_open(path, framework="np") as file:
        assert file.metadata() == {
            "format": "ostinato-kv-block",
            "version": "1",
            "namespace": "n",
            "digest": digest_of(1).hex(),
            "sha256": sha256(data_of(1)).hexdigest(),
        }


def test_a_block_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.put(digest_of(1), data_of(1))
    before = path_of(tmp_path, digest_of(1)).stat().st_ino
    assert files.put(digest_of(1), data_of(1))
    assert path_of(tmp_path, digest_of(1)).stat().st_ino == before


def test_a_closed_cache_does_nothing(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.put(digest_of(1), data_of(1))
    files.close()
    files.close()
    assert not files.put(digest_of(2), data_of(2))
    assert files.get(digest_of(1)) is None
    assert digest_of(1) not in files


# Damage


def test_a_file_cut_at_any_byte_is_a_miss(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.put(digest_of(1), data_of(1))
    path = path_of(tmp_path, digest_of(1))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert files.get(digest_of(1)) is None, length
        assert not path.exists(), length
    path.write_bytes(whole)
    assert files.get(digest_of(1)) == data_of(1)


def test_a_flip_of_any_bit_is_a_miss(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.put(digest_of(1), data_of(1, 16))
    path = path_of(tmp_path, digest_of(1))
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            assert files.get(digest_of(1)) is None, (at, bit)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff" * 500,
        bytes(500),
        block_header(digest_of(2), "n", NUM_BYTES, sha256(data_of(1)).digest()) + data_of(1),
        block_header(digest_of(1), "m", NUM_BYTES, sha256(data_of(1)).digest()) + data_of(1),
        block_header(digest_of(1), "n", NUM_BYTES, sha256(data_of(1)).digest()) + data_of(2),
        block_header(digest_of(1), "n", NUM_BYTES, sha256(data_of(1)).digest()) + data_of(1) + b"x",
        bytes(101 * FILE_BYTES),
    ],
)
def test_another_file_is_a_miss_and_removed_with_one_warning(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    files = open_files(tmp_path)
    files.put(digest_of(1), data_of(1))
    path = path_of(tmp_path, digest_of(1))
    path.write_bytes(content)
    assert files.get(digest_of(1)) is None
    assert files.get(digest_of(1)) is None
    assert not path.exists()
    assert len(files) == 0 and files.num_bytes == 0
    assert [str(path) in record.message for record in caplog.records] == [True]
    assert files.put(digest_of(1), data_of(1))
    assert files.get(digest_of(1)) == data_of(1)


def test_a_damaged_file_of_another_size_is_put_again(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.put(digest_of(1), data_of(1))
    path_of(tmp_path, digest_of(1)).write_bytes(b"half")
    assert files.put(digest_of(1), data_of(1))
    assert files.get(digest_of(1)) == data_of(1)
    assert files.num_bytes == FILE_BYTES


def test_a_file_that_vanishes_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = open_files(tmp_path)
    files.put(digest_of(1), data_of(1))
    path_of(tmp_path, digest_of(1)).unlink()
    assert digest_of(1) not in files
    assert files.get(digest_of(1)) is None
    assert len(files) == 0 and not caplog.records


def test_a_folder_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    files = open_files(tmp_path, max_blocks=3)
    for index in range(3):
        files.put(digest_of(index), data_of(index))
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    for index in range(3, 8):
        assert files.put(digest_of(index), data_of(index))
    assert bytes_in(tmp_path) <= files.max_bytes
    assert files.get(digest_of(7)) == data_of(7)


# A disk that does not do as it is told


@pytest.mark.parametrize("cause", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO, errno.EDQUOT, errno.ENOLCK])
@pytest.mark.parametrize("call", ["os.write", "os.replace", "os.open", "fcntl.flock", "os.fsync"])
def test_a_failed_put_is_dropped_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cause: int, call: str
) -> None:
    files = BlockFiles(tmp_path, namespace="n", max_bytes=100 * FILE_BYTES)
    files.put(digest_of(0), data_of(0))

    def fail(*args: object, **options: object) -> None:
        raise OSError(cause, os.strerror(cause))

    with monkeypatch.context() as broken:
        broken.setattr(f"ostinato.connectors.folder_locks.{call}", fail)
        for index in range(1, 4):
            assert not files.put(digest_of(index), data_of(index))
    assert len(caplog.records) == 1
    assert [path for path in tmp_path.rglob("*.tmp")] == []
    assert held(files) == [0] and files.num_bytes == FILE_BYTES
    assert files.put(digest_of(1), data_of(1))
    assert files.get(digest_of(1)) == data_of(1)


def test_a_disk_that_fills_in_the_middle_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_files(tmp_path)
    write = os.write
    left = 0

    def fill(fd: int, data: memoryview) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "full")
        count = write(fd, data[: min(left, 7)])
        left -= count
        return count

    monkeypatch.setattr("ostinato.connectors.folder_locks.os.write", fill)
    for room in range(FILE_BYTES):
        left = room
        assert not files.put(digest_of(1), data_of(1))
        assert files.get(digest_of(1)) is None
    left = FILE_BYTES
    assert files.put(digest_of(1), data_of(1))
    assert files.get(digest_of(1)) == data_of(1)


def test_a_folder_in_the_wrong_place_and_a_file_in_that_of_a_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = open_files(tmp_path)
    path_of(tmp_path, digest_of(1)).mkdir(parents=True)
    path_of(tmp_path, digest_of(2)).parent.write_text("in the way")
    for index in (1, 2):
        files.put(digest_of(index), data_of(index))
        assert files.get(digest_of(index)) is None
        assert digest_of(index) not in files
    assert files.put(digest_of(3), data_of(3))
    assert caplog.records
    assert held(open_files(tmp_path)) == [3]


def test_a_folder_that_cannot_be_written_still_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_files(tmp_path).put(digest_of(1), data_of(1))

    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr("ostinato.connectors.folder_locks.os.open", fail)
    monkeypatch.setattr("ostinato.connectors.files.os.utime", fail)
    files = open_files(tmp_path)
    assert len(files) == 1
    assert files.get(digest_of(1)) == data_of(1)
    assert not files.put(digest_of(2), data_of(2))


def test_a_victim_that_cannot_be_removed_keeps_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_files(tmp_path, max_blocks=1)
    files.put(digest_of(0), data_of(0))
    unlink = Path.unlink

    def fail(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "no")
        unlink(path, missing_ok)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", fail)
        assert not files.put(digest_of(1), data_of(1))
    assert held(files) == [0]
    assert files.put(digest_of(1), data_of(1))
    assert held(files) == [1]


def test_options_that_cannot_be(tmp_path: Path) -> None:
    for namespace in ("", "a/b", "..", ".hidden", "x" * 101, "ü"):
        with pytest.raises(ConfigError, match="namespace"):
            BlockFiles(tmp_path, namespace=namespace, max_bytes=1)
    with pytest.raises(ConfigError, match="max_bytes=0"):
        BlockFiles(tmp_path, namespace="n", max_bytes=0)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        BlockFiles(tmp_path / "file", namespace="n", max_bytes=1)


# The bound and the order


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    files = open_files(tmp_path, max_blocks=3)
    for index in range(3):
        files.put(digest_of(index), data_of(index))
    files.get(digest_of(0))
    files.put(digest_of(3), data_of(3))
    assert held(files) == [0, 2, 3]
    files.put(digest_of(2), data_of(2))
    files.put(digest_of(4), data_of(4))
    assert held(files) == [2, 3, 4]


def test_a_block_larger_than_all_is_dropped_and_evicts_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = open_files(tmp_path, max_blocks=2)
    files.put(digest_of(0), data_of(0))
    for _ in range(2):
        assert not files.put(digest_of(1), bytes(3 * FILE_BYTES))
    assert held(files) == [0]
    assert len(caplog.records) == 1


def test_opening_with_less_room_evicts(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    for index in range(6):
        files.put(digest_of(index), data_of(index))
    files.get(digest_of(1))
    assert held(open_files(tmp_path, max_blocks=3.5)) == [1, 4, 5]


def test_namespaces_do_not_see_each_other(tmp_path: Path) -> None:
    ours, other = open_files(tmp_path, max_blocks=2), open_files(tmp_path, max_blocks=2, namespace="m")
    ours.put(digest_of(1), data_of(1))
    for index in range(1, 5):
        other.put(digest_of(index), data_of(index + 10))
    assert held(ours) == [1]
    assert ours.get(digest_of(1)) == data_of(1)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.put(digest_of(1), data_of(1))
    strange = [
        tmp_path / "n" / "README",
        path_of(tmp_path, digest_of(1)).with_name("notes.tmp"),
        path_of(tmp_path, digest_of(1)).with_name("00.safetensors"),
    ]
    for path in strange:
        path.write_text("mine")
    assert len(open_files(tmp_path, max_blocks=1)) == 1
    assert all(path.exists() for path in strange)


_DEEDS = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 9), st.integers(0, 300)),
    st.tuples(st.just("get"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("vanish"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("reopen"), st.just(0), st.just(0)),
)


@given(st.lists(_DEEDS, max_size=40), st.integers(400, 3000))
def test_order_and_bound_follow_the_model(deeds: list[tuple[str, int, int]], max_bytes: int) -> None:
    logging.getLogger("ostinato").disabled = True
    try:
        with TemporaryDirectory() as folder:
            follow_the_model(Path(folder), deeds, max_bytes)
    finally:
        logging.getLogger("ostinato").disabled = False


def follow_the_model(folder: Path, deeds: list[tuple[str, int, int]], max_bytes: int) -> None:
    files = BlockFiles(folder, namespace="n", max_bytes=max_bytes, fsync=False)
    model: OrderedDict[int, bytes] = OrderedDict()
    sizes: dict[int, int] = {}  # a block's data never change their length

    def total() -> int:
        return sum(file_bytes(digest_of(index), "n", len(data)) for index, data in model.items())

    for deed, index, num_bytes in deeds:
        digest = digest_of(index)
        if deed == "put":
            data = data_of(index, sizes.setdefault(index, num_bytes))
            fits = file_bytes(digest, "n", len(data)) <= max_bytes
            assert files.put(digest, data) == fits
            if fits:
                model[index] = data
                model.move_to_end(index)
                while total() > max_bytes:
                    model.popitem(last=False)
        elif deed == "get":
            assert files.get(digest) == model.get(index)
            if index in model:
                model.move_to_end(index)
        elif deed == "vanish":
            path_of(folder, digest).unlink(missing_ok=True)
            assert files.get(digest) is None
            model.pop(index, None)
        else:
            files.close()
            files = BlockFiles(folder, namespace="n", max_bytes=max_bytes, fsync=False)
        assert held(files, 10) == sorted(model)
        assert (len(files), files.num_bytes) == (len(model), total())


def test_many_threads(tmp_path: Path) -> None:
    files = open_files(tmp_path, max_blocks=10)
    wrong: list[object] = []

    def work(seed: int) -> None:
        for step in range(60):
            index = (seed * 7 + step * step) % 20
            if not files.put(digest_of(index), data_of(index)):
                wrong.append(("put", index))
            if files.get(digest_of(index)) not in (None, data_of(index)):
                wrong.append(("get", index))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert bytes_in(tmp_path) == files.num_bytes <= files.max_bytes


# Several caches over one folder, as several processes would be


def test_blocks_of_another_are_found(tmp_path: Path) -> None:
    ours, other = open_files(tmp_path), open_files(tmp_path)
    other.put(digest_of(1), data_of(1))
    assert digest_of(1) in ours
    assert ours.get(digest_of(1)) == data_of(1)
    assert len(ours) == 1


def test_the_bound_holds_for_all_together(tmp_path: Path) -> None:
    caches = [open_files(tmp_path, max_blocks=10) for _ in range(3)]
    for index in range(60):
        assert caches[index % 3].put(digest_of(index), data_of(index))
        assert bytes_in(tmp_path) <= caches[0].max_bytes
        assert caches[0].get(digest_of(index)) == data_of(index)
    assert len(held(caches[0], 60)) >= 8, "a sixteenth of the room is spared, not more"


def test_a_block_that_another_uses_is_not_the_next_to_go(tmp_path: Path) -> None:
    ours, other = open_files(tmp_path, max_blocks=3), open_files(tmp_path, max_blocks=3)
    for index in range(3):
        ours.put(digest_of(index), data_of(index))
    other.get(digest_of(0))
    ours.put(digest_of(3), data_of(3))
    assert held(ours) == [0, 2, 3]


@pytest.mark.parametrize("damage", ["deleted", "emptied", "zeroed"])
def test_a_lost_lock_file_does_not_break_the_bound(tmp_path: Path, damage: str) -> None:
    ours, other = open_files(tmp_path, max_blocks=4), open_files(tmp_path, max_blocks=4)
    for index in range(40):
        assert (ours, other)[index // 4 % 2].put(digest_of(index), data_of(index))
        assert bytes_in(tmp_path) <= ours.max_bytes
        if index % 4 == 3:
            if damage == "deleted":
                (tmp_path / "n" / "lock").unlink()
            else:
                (tmp_path / "n" / "lock").write_bytes(bytes(8) if damage == "zeroed" else b"")


# The name of what is compatible


def test_namespace_of_is_stable_and_tells_facts_apart() -> None:
    facts: dict[str, object] = {"model": "abc", "dtype": "bfloat16", "shape": (16, 2, 16, 8, 64), "version": 1}
    name = namespace_of(**facts)
    assert name == "cfd753d5e2f0dd1ca7f053c3"
    assert namespace_of(**dict(reversed(facts.items()))) == name
    others = [facts | {"dtype": "float16"}, facts | {"version": "1"}, facts | {"shape": (16, 2, 16, 64, 8)}, {}]
    assert len({name, *(namespace_of(**other) for other in others)}) == 5
    with pytest.raises(TypeError):
        namespace_of(dtype=object())


def test_a_namespace_is_a_folder_name(tmp_path: Path) -> None:
    assert open_files(tmp_path, namespace=namespace_of(a=1)).put(digest_of(1), data_of(1))
