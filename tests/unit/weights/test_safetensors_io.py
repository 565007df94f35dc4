"""Safetensors folders: single, sharded, damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ostinato.errors import WeightError
from ostinato.weights.safetensors_io import SafetensorsReader

TENSORS = {
    "a": torch.arange(15, dtype=torch.float32).reshape(3, 5),
    "b": torch.full((7,), 0.5, dtype=torch.bfloat16),
    "c": torch.tensor([1.5, -2.0, 3.0], dtype=torch.float16),
}


def shard(folder: Path, files: dict[str, list[str]], weight_map: dict[str, str] | None = None) -> None:
    for file, names in files.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    mapping = weight_map or {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))


def check(folder: Path) -> None:
    reader = SafetensorsReader(folder)
    loaded = dict(reader.tensors())
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert reader.tensor_infos() == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()}
    assert reader.total_bytes == 15 * 4 + 7 * 2 + 3 * 2


def test_single_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    save_file(TENSORS, tmp_path / "consolidated.safetensors")
    check(tmp_path)


def test_shards(tmp_path: Path) -> None:
    shard(tmp_path, {"model-1.safetensors": ["b"], "model-2.safetensors": ["a", "c"]})
    save_file(TENSORS, tmp_path / "consolidated.safetensors")  # the same weights a second time, not in the index
    check(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, tmp_path / "x.safetensors")
    save_file({"c": TENSORS["c"]}, tmp_path / "y.safetensors")
    check(tmp_path)
    save_file({"a": TENSORS["a"]}, tmp_path / "z.safetensors")
    with pytest.raises(WeightError, match=r"z\.safetensors: has tensors that another shard has too: a"):
        SafetensorsReader(tmp_path)


def test_missing_shards_are_listed(tmp_path: Path) -> None:
    shard(
        tmp_path, {"m-1.safetensors": ["a"]}, {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-3.safetensors"}
    )
    with pytest.raises(WeightError, match=r"2 of 3 shards are missing: m-2\.safetensors, m-3\.safetensors"):
        SafetensorsReader(tmp_path)


def test_a_tensor_that_the_index_promises_must_exist(tmp_path: Path) -> None:
    shard(tmp_path, {"m-1.safetensors": ["a", "b"]}, {name: "m-1.safetensors" for name in TENSORS})
    with pytest.raises(WeightError, match="names 1 tensors that no shard has: c"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not a safetensors index"),
        ("[]", "not a safetensors index"),
        ('{"weight_map": ["a"]}', "must map"),
        ('{"weight_map": {"a": 3}}', "must map"),
        ('{"weight_map": {"a": "../../other.safetensors"}}', "not a plain file name"),
    ],
)
def test_broken_index(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightError, match=message):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightError, match="not a whole safetensors file"):
        SafetensorsReader(tmp_path)
