"""How processes that share a folder of blocks keep out of each other's way: two uses of `flock`.

The kernel drops a `flock` when its process dies, however it dies. That tells a dead writer's leftover from a live
writer's file where process ids cannot: they are reused, and mean nothing to a container or host next door.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import time
from pathlib import Path
from types import TracebackType
from uuid import uuid4

__all__ = ["FolderLock", "TempFile", "is_temp_name", "remove_if_dead"]

_TEMP_NAME = re.compile(r"[0-9a-f]{32}\.tmp")
_COUNTER = struct.Struct("<Q")


class TempFile:
    """A file in the making, under a name that nobody looks for, locked for as long as its writer lives.

    A context manager: what was not committed when it ends is removed. All methods raise OSError.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` must be on the file system of the place the file is meant for, and exist."""
        while True:
            self.path = folder / f"{uuid4().hex}.tmp"
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                if os.fstat(self._fd).st_nlink:
                    return
            except OSError:
                self.__exit__(None, None, None)
                raise
            os.close(self._fd)  # between `open` and `flock` it looked like a dead writer's, and was removed: once more

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest.nbytes:  # a nearly full disk takes a part and refuses the next
            rest = rest[os.write(self._fd, rest) :]

    def sync(self) -> None:
        os.fsync(self._fd)

    def commit(self, path: Path, mtime_ns: int) -> None:
        """Give the file its time and its name, in one step for all who look; what was there is replaced."""
        os.utime(self._fd, ns=(mtime_ns, mtime_ns))
        os.replace(self.path, path)

    def __enter__(self) -> TempFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.path.unlink(missing_ok=True)  # names are never used twice, so after a commit this finds nothing
        finally:
            os.close(self._fd)


def is_temp_name(name: str) -> bool:
    """Whether a TempFile may have made this name."""
    return _TEMP_NAME.fullmatch(name) is not None


def remove_if_dead(path: Path) -> None:
    """Remove a TempFile's file unless its writer lives. What cannot be opened or locked is left alone."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        pass
    finally:
        os.close(fd)


class FolderLock:
    """One process and thread at a time, with a counter that all share: bytes ever added to the folder.

    A context manager that waits its turn. Opened anew each time, so that threads of one process exclude each other too,
    and so that a folder that was deleted meanwhile does no harm. All methods raise OSError.
    """

    def __init__(self, path: Path) -> None:
        """`path` is the lock's own file, made when it is missing."""
        self._path = path
        self._fd = -1

    def __enter__(self) -> FolderLock:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except OSError:
            os.close(self._fd)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def counter(self) -> int:
        """In a new or damaged file it begins at the time in ns: far from what anyone remembers of the file before."""
        data = os.pread(self._fd, _COUNTER.size, 0)
        if len(data) != _COUNTER.size:
            self.set_counter(time.time_ns())
            data = os.pread(self._fd, _COUNTER.size, 0)
        value: int = _COUNTER.unpack(data)[0]
        return value

    def set_counter(self, value: int) -> None:
        os.pwrite(self._fd, _COUNTER.pack(value % 2**64), 0)
