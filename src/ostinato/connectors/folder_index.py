"""Which blocks a folder holds and in which order they were used: a picture in memory, taken from the files."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ostinato.connectors.folder_locks import is_temp_name, remove_if_dead

__all__ = ["Entry", "FolderIndex"]

_SUFFIX = ".safetensors"
_NAME = re.compile(r"((?:[0-9a-f]{2})+)" + re.escape(_SUFFIX))


class Entry(NamedTuple):
    size: int  # bytes of the file
    used_ns: int  # its time of modification, which stands for its last use


class FolderIndex:
    """Blocks by digest, least recently used first. Not safe from several threads at once.

    Files with other names than a block's or a TempFile's are not ours: they are neither counted nor touched.
    """

    def __init__(self, root: Path, on_error: Callable[[OSError], None]) -> None:
        """`on_error` is told of a folder that cannot be listed; its blocks are then not counted."""
        self.num_bytes = 0
        self._root = root
        self._on_error = on_error
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: object) -> bool:
        return digest in self._entries

    def path(self, digest: bytes) -> Path:
        """Where the block's file is, if it has one. Two levels, so that no folder grows too long to list."""
        assert 1 <= len(digest) <= 64, f"a digest of {len(digest)} bytes"
        name = digest.hex()
        return self._root / name[:2] / f"{name}{_SUFFIX}"

    def oldest(self) -> tuple[bytes, Entry] | None:
        return next(iter(self._entries.items()), None)

    def remember(self, digest: bytes, entry: Entry) -> None:
        """The block is there, and was used last of all."""
        self.forget(digest)
        self._entries[digest] = entry
        self.num_bytes += entry.size

    def forget(self, digest: bytes) -> None:
        entry = self._entries.pop(digest, None)
        self.num_bytes -= entry.size if entry else 0

    def rebuild(self) -> None:
        """List the folder anew, and remove what dead writers left in it."""
        found: list[tuple[int, bytes, int]] = []
        for folder in self._list(self._root):
            if not folder.is_dir(follow_symlinks=False):
                continue
            for file in self._list(folder.path):
                name = _NAME.fullmatch(file.name)
                try:
                    if name and name[1][:2] == folder.name and file.is_file(follow_symlinks=False):
                        stat = file.stat(follow_symlinks=False)
                        found.append((stat.st_mtime_ns, bytes.fromhex(name[1]), stat.st_size))
                    elif is_temp_name(file.name):
                        remove_if_dead(Path(file.path))
                except FileNotFoundError:
                    continue  # gone since it was listed
        self._entries = OrderedDict((digest, Entry(size, used_ns)) for used_ns, digest, size in sorted(found))
        self.num_bytes = sum(entry.size for entry in self._entries.values())

    def _list(self, folder: str | Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return list(entries)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._on_error(error)
            return []
