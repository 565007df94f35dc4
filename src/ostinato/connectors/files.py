"""KV blocks as files on disk, named by their digests: a cache that outlives the process and that processes may share.

    folder/namespace/ab/abcdef....safetensors

The files are the truth. The index in memory says which to evict next and is rebuilt from the folder; a block that is
not in it is still found, and one whose file has gone is a miss. Nothing here may hurt the engine: what cannot be
written is dropped, what cannot be read or is not exactly right is a miss.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from hashlib import sha256
from pathlib import Path

from ostinato.connectors.block_file import DamagedBlockError, block_header, file_bytes, namespace_of, read_block
from ostinato.connectors.folder_index import Entry, FolderIndex
from ostinato.connectors.folder_locks import FolderLock, TempFile
from ostinato.errors import ConfigError

__all__ = ["BlockFiles", "namespace_of"]

logger = logging.getLogger("ostinato")

_LOCK_NAME = "lock"
_PLAIN_NAME = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]{0,99}")


class BlockFiles:
    """The blocks of one namespace, at most `max_bytes` of files; the least recently used are removed for new ones.

    The bound holds at every moment, whoever shares the folder, for processes that open it with the same `max_bytes`;
    beside it there are the files in the making, one for each `put` that runs. The order of use survives as the times
    of the files. Safe from any thread; a call takes as long as the disk does, and a `put` also waits for the others.
    """

    def __init__(self, folder: str | Path, *, namespace: str, max_bytes: int, fsync: bool = True) -> None:
        """Makes the folder, removes what dead writers left in it, and evicts down to `max_bytes`.

        With `fsync` a block is on the disk before it has its name, so that it survives a power cut; without, a block
        that did not is a miss. Raises ConfigError for a folder that cannot be made or a namespace that is not a plain
        file name of at most 100 characters.
        """
        if not _PLAIN_NAME.fullmatch(namespace):
            message = f"namespace={namespace!r}: must be 1 to 100 letters, digits, dots, - or _, and begin with no dot"
            raise ConfigError(message, field="namespace")
        if max_bytes < 1:
            raise ConfigError(f"max_bytes={max_bytes}: must be at least 1 byte", field="max_bytes")
        self.namespace, self.max_bytes = namespace, max_bytes
        self._root = Path(folder) / namespace
        self._fsync = fsync
        self._mutex = threading.RLock()  # of all below; taken after the folder's lock, never before
        self._index = FolderIndex(self._root, lambda error: self._complain("listing the folder", error))
        self._counter = 0  # the shared counter as last seen
        self._unseen_bytes = 0  # at most so much was added by others since the folder was last listed
        self._last_ns = 0
        self._complaints: set[tuple[str, int | None]] = set()
        self._closed = False
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self._root}: cannot be made, to hold KV blocks: {error}", field="folder") from error
        try:
            with FolderLock(self._root / _LOCK_NAME) as lock, self._mutex:
                self._counter = lock.counter()
                self._index.rebuild()
                self._evict(max_bytes)
        except OSError as error:  # a folder that is read-only still serves
            self._complain("opening the folder", error)
            self._index.rebuild()

    def put(self, digest: bytes, data: memoryview | bytes) -> bool:
        """Store a block; whether it is there now. One that is there already counts as used and is not written again."""
        view = memoryview(data).cast("B")
        size = file_bytes(digest, self.namespace, view.nbytes)
        if self._closed:
            return False
        try:
            if size > self.max_bytes:
                raise OSError(errno.EFBIG, f"the block's file has {size} bytes, the whole cache {self.max_bytes}")
            if not self._touch(digest, size):
                self._store(digest, view, size)
        except OSError as error:
            self._complain("storing a block", error)
            return False
        return True

    def get(self, digest: bytes) -> bytes | None:
        """The data of a block, exactly as it was put, or None. A file that is not the block's is removed."""
        if self._closed:
            return None
        path = self._index.path(digest)
        try:
            data = read_block(path, digest, self.namespace, self.max_bytes)
            self._touch(digest)
            return data
        except DamagedBlockError as damage:
            logger.warning("%s %s; removed", path, damage)
            self._remove(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._complain("reading a block", error)
            return None
        with self._mutex:
            self._index.forget(digest)
        return None

    def __contains__(self, digest: bytes) -> bool:
        """Whether the block has a file, which may yet turn out damaged. Not a use."""
        return not self._closed and os.path.isfile(self._index.path(digest))

    def known(self, digest: bytes) -> bool:
        """Whether the block had a file when this process last looked. Looks at no disk and waits for nobody."""
        return digest in self._index

    def __len__(self) -> int:
        """Number of blocks, without those that other processes added or removed since this one last looked."""
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that `len` counts, headers included."""
        return self._index.num_bytes

    def close(self) -> None:
        """The files stay. From now on a `put` does nothing and a `get` finds nothing."""
        self._closed = True

    def _store(self, digest: bytes, view: memoryview, size: int) -> None:
        path = self._index.path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        with TempFile(path.parent) as temp:
            temp.write(block_header(digest, self.namespace, view.nbytes, sha256(view).digest()))
            temp.write(view)
            if self._fsync:
                temp.sync()  # the folder is not synced: a name that a power cut takes back is a miss
            with FolderLock(self._root / _LOCK_NAME) as lock, self._mutex:
                self._make_room(size, lock.counter())
                # counted before it is there: after a crash in between others look once too often, never too late
                lock.set_counter(self._counter + size)
                self._counter += size
                used_ns = self._now_ns()
                temp.commit(path, used_ns)
                self._index.remember(digest, Entry(size, used_ns))

    def _make_room(self, size: int, counter: int) -> None:
        """Evict until `size` more bytes fit. Raises OSError when a file cannot be removed."""
        limit = self.max_bytes - size
        self._unseen_bytes += (counter - self._counter) % 2**64  # a lock file that was lost looks like very many bytes
        self._counter = counter
        if self._unseen_bytes and self._index.num_bytes + self._unseen_bytes > limit:
            self._index.rebuild()
            self._unseen_bytes = 0
            limit -= self.max_bytes // 16  # room to spare, or two writers would list a full folder at every block
        self._evict(limit)

    def _evict(self, limit: int) -> None:
        while self._index.num_bytes > limit and (oldest := self._index.oldest()):
            digest, entry = oldest
            path = self._index.path(digest)
            try:
                stat = path.stat()
                if stat.st_mtime_ns > entry.used_ns:  # another process has used it since
                    self._index.remember(digest, Entry(stat.st_size, stat.st_mtime_ns))
                    continue
                path.unlink()
            except FileNotFoundError:
                pass
            self._index.forget(digest)

    def _touch(self, digest: bytes, size: int | None = None) -> bool:
        """Count the block as used just now. False if it has no file, or one of another size than given."""
        path = self._index.path(digest)
        try:
            found = path.stat().st_size
            if size is not None and found != size:
                return False
            with self._mutex:
                used_ns = self._now_ns()
                try:
                    os.utime(path, ns=(used_ns, used_ns))
                except FileNotFoundError:
                    return False
                except OSError as error:  # a file of another user, or a disk that is read-only, serves all the same
                    self._complain("keeping the order of use", error)
                self._index.remember(digest, Entry(found, used_ns))
        except FileNotFoundError:
            return False
        return True

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._complain("removing a file", error)

    def _now_ns(self) -> int:
        """The time, later than at any call before: order of use must survive a clock that stands still or goes back."""
        self._last_ns = max(self._last_ns + 1, time.time_ns())
        return self._last_ns

    def _complain(self, doing: str, error: OSError) -> None:
        """One warning for each cause: a disk that stays full must not fill the log too."""
        with self._mutex:
            if (doing, error.errno) in self._complaints:
                return
            self._complaints.add((doing, error.errno))
        logger.warning("%s: %s failed and is skipped, from now on without a warning: %s", self._root, doing, error)
