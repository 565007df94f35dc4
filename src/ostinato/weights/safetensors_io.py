"""Safetensors files of a Hugging Face folder, whole or sharded, read through mmap."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ostinato.errors import WeightError
from ostinato.weights.base import TensorInfo

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def find_shards(folder: Path) -> list[Path]:
    """The folder's weight files in order, empty if it has none.

    The index decides when there is one, then `model.safetensors`, then every `*.safetensors` (a folder may carry the
    same weights a second time, as `consolidated.safetensors`). Raises WeightError for shards that the index names and
    the folder lacks.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        shards = [folder / name for name in sorted(set(read_index(index).values()))]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise WeightError(f"{folder}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}")
        return shards
    single = folder / SINGLE_NAME
    if single.is_file():
        return [single]
    return sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))


def read_index(index: Path) -> dict[str, str]:
    """Tensor name to shard file name."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{index}: is not a safetensors index with a weight_map: {error!r}") from error
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise WeightError(f"{index}: weight_map must map tensor names to file names")
    for name in set(weight_map.values()):
        if Path(name).name != name:
            raise WeightError(f"{index}: shard {name!r} is not a plain file name")
    return weight_map


class SafetensorsReader:
    """The tensors of a folder. Raises WeightError for a missing, broken or contradictory file."""

    def __init__(self, folder: Path) -> None:
        """Reads the header of every shard and checks them against the index."""
        self._infos: dict[str, TensorInfo] = {}
        self._shards: dict[Path, list[str]] = {}
        for shard in find_shards(folder):
            infos = _read_header(shard)
            twice = sorted(infos.keys() & self._infos.keys())
            if twice:
                raise WeightError(f"{shard}: has tensors that another shard has too: {', '.join(twice[:5])}")
            self._infos |= infos
            self._shards[shard] = list(infos)
        index = folder / INDEX_NAME
        if index.is_file():
            absent = sorted(read_index(index).keys() - self._infos.keys())
            if absent:
                raise WeightError(f"{index}: names {len(absent)} tensors that no shard has: {', '.join(absent[:5])}")

    @property
    def total_bytes(self) -> int:
        return sum(info.dtype.itemsize * torch.Size(info.shape).numel() for info in self._infos.values())

    def tensor_infos(self) -> dict[str, TensorInfo]:
        return dict(self._infos)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor once, shard by shard, on the CPU; a tensor is read when it is asked for."""
        for shard, names in self._shards.items():
            try:
                with safe_open(str(shard), framework="pt") as file:
                    for name in names:
                        yield name, file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise WeightError(f"{shard}: {error}") from error


def _read_header(shard: Path) -> dict[str, TensorInfo]:
    infos = {}
    try:
        with safe_open(str(shard), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                piece = file.get_slice(name)
                dtype = piece.get_dtype()
                if dtype not in _DTYPES:
                    raise WeightError(f"{shard}: tensor {name} has dtype {dtype}, which is not supported")
                infos[name] = TensorInfo(tuple(piece.get_shape()), _DTYPES[dtype])
    except (SafetensorError, OSError) as error:
        size = shard.stat().st_size if shard.exists() else 0
        raise WeightError(f"{shard}: not a whole safetensors file ({size} bytes): {error}") from error
    return infos
