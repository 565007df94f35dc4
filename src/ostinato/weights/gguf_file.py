"""Reads the head of a GGUF file: metadata and tensor directory. No tensor data is touched.

Format (GGUF specification, versions 2 and 3, little-endian): magic, version, number of tensors, number of metadata
entries; the entries (key, type, value); the directory (name, dimensions innermost first, type, offset); padding to the
alignment; then the data that the offsets count from. Written for speed: the stock reader wraps every vocabulary entry
in arrays and takes seconds where this takes tens of milliseconds.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ostinato.errors import WeightError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_STRUCTS = {kind: struct.Struct("<" + code) for kind, code in _SCALARS.items()}
_U32, _U64 = _STRUCTS[4], _STRUCTS[10]


@dataclass(frozen=True, slots=True)
class GgmlType:
    """How GGML packs numbers: `block_size` elements take `type_bytes` bytes."""

    name: str
    block_size: int
    type_bytes: int


GGML_TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    30: GgmlType("BF16", 1, 2),
}
"""The supported types by their id in the file."""

UNSUPPORTED_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Names of the others, for the refusal."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the directory. `shape` is outermost first, as in torch; `offset` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The head of a GGUF file, and its bytes mapped copy-on-write."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    data: mmap.mmap

    def raw(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes [outer dimensions..., bytes of one row], a view of the file."""
        flat = np.frombuffer(self.data, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        return flat.reshape(*tensor.shape[:-1], -1)


def read_gguf(path: Path) -> GgufFile:
    """Reads metadata and directory of `path`.

    Raises WeightError, with the byte offset, for a file that is not GGUF, is cut short, or contradicts itself; and,
    with all of them listed, for tensors of a type that is not supported.
    """
    try:
        with path.open("rb") as file:
            # Copy-on-write, so that torch can wrap the pages without a copy and nobody can write to the file.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise WeightError(f"{path}: cannot be read as GGUF: {error}") from error
    cursor = _Cursor(data, path)
    if data[:4] != MAGIC:
        raise WeightError(f"{path}: not a GGUF file: begins with {data[:4]!r} instead of {MAGIC!r}")
    cursor.position = 4
    version = cursor.scalar(_U32)
    if version not in SUPPORTED_VERSIONS:
        raise WeightError(f"{path}: GGUF version {version} is not supported, only 2 and 3 (little-endian)")
    num_tensors, num_entries = cursor.count(least_bytes=24), cursor.count(least_bytes=13)
    metadata = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar(_U32))
    return GgufFile(path, metadata, _read_directory(cursor, num_tensors, metadata), data)


def _read_directory(cursor: _Cursor, num_tensors: int, metadata: Mapping[str, Any]) -> dict[str, GgufTensor]:
    entries = []
    for _ in range(num_tensors):
        name = cursor.string()
        num_dims = cursor.scalar(_U32)
        if not 1 <= num_dims <= 4:
            raise cursor.corrupt(f"tensor {name!r} has {num_dims} dimensions")
        shape = tuple(cursor.scalar(_U64) for _ in range(num_dims))[::-1]
        entries.append((name, shape, cursor.scalar(_U32), cursor.scalar(_U64)))
    refused = {kind for _, _, kind, _ in entries} - GGML_TYPES.keys()
    if refused:
        names = ", ".join(UNSUPPORTED_TYPES.get(kind, f"type {kind}") for kind in sorted(refused))
        supported = ", ".join(ggml_type.name for ggml_type in GGML_TYPES.values())
        raise WeightError(f"{cursor.path}: has tensors in {names}; supported are {supported}")
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.corrupt(f"general.alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, relative in entries:
        ggml_type = GGML_TYPES[kind]
        num_elements = int(np.prod(shape, dtype=object))
        num_bytes = num_elements // ggml_type.block_size * ggml_type.type_bytes
        if name in tensors:
            raise cursor.corrupt(f"tensor {name!r} is listed twice")
        if num_elements < 1 or shape[-1] % ggml_type.block_size:
            raise cursor.corrupt(f"tensor {name!r} of shape {shape} cannot be stored as {ggml_type.name}")
        offset = start + relative
        if offset + num_bytes > len(cursor.data):
            raise WeightError(
                f"{cursor.path}: cut short: tensor {name!r} is at bytes {offset}..{offset + num_bytes}, "
                f"but the file ends at {len(cursor.data)}. Fetch the file again."
            )
        tensors[name] = GgufTensor(name, shape, ggml_type, offset, num_bytes)
    return tensors


class _Cursor:
    """A position in the mapped file; each method reads one thing and moves past it."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.position = data, path, 0

    def corrupt(self, what: str) -> WeightError:
        return WeightError(f"{self.path}: corrupt GGUF header at byte {self.position} of {len(self.data)}: {what}")

    def need(self, num_bytes: int) -> None:
        if self.position + num_bytes > len(self.data):
            raise self.corrupt(f"{num_bytes} more bytes expected, the file ends before")

    def scalar(self, kind: struct.Struct) -> Any:
        self.need(kind.size)
        (value,) = kind.unpack_from(self.data, self.position)
        self.position += kind.size
        return value

    def count(self, least_bytes: int) -> int:
        """A number of items of at least `least_bytes` each, checked against what is left of the file."""
        count: int = self.scalar(_U64)
        if count * least_bytes > len(self.data) - self.position:
            raise self.corrupt(f"{count} items announced, more than the rest of the file can hold")
        return count

    def string(self) -> str:
        # A vocabulary is some 100,000 of these, so the bytes are counted here and not by `scalar`.
        start = self.position + _U64.size
        length: int = _U64.unpack_from(self.data, self.position)[0] if start <= len(self.data) else 0
        end = start + length
        if end > len(self.data):
            raise self.corrupt(f"{end - self.position} more bytes expected, the file ends before")
        try:
            text = self.data[start:end].decode()
        except UnicodeDecodeError as error:
            raise self.corrupt(f"text is not UTF-8: {error}") from error
        self.position = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _STRUCTS:
            return self.scalar(_STRUCTS[kind])
        if kind == _ARRAY:
            return self.array()
        raise self.corrupt(f"unknown metadata type {kind}")

    def array(self) -> list[Any]:
        kind = self.scalar(_U32)
        if kind == _STRING:
            return [self.string() for _ in range(self.count(least_bytes=8))]
        if kind not in _STRUCTS:
            raise self.corrupt(f"array of metadata type {kind}")
        count = self.count(least_bytes=_STRUCTS[kind].size)
        items = struct.Struct(f"<{count}{_SCALARS[kind]}")
        values = list(items.unpack_from(self.data, self.position))
        self.position += items.size
        return values
