"""Tests that need a CUDA device. Models are random and made here: nothing is downloaded."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ..e2e.models import TinyModel, build_tiny

HERE = Path(__file__).parent
ModelFactory = Callable[..., TinyModel]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder carries the marker `gpu`, and is skipped where there is no device."""
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    """`small_model(head_dim=..., **overrides)`: a random Llama on disk, in float32."""
    made: dict[str, TinyModel] = {}

    def make(arch: str = "Llama", *, head_dim: int = 64, **overrides: Any) -> TinyModel:
        fields = {
            "vocab_size": 512,
            "hidden_size": 192,
            "intermediate_size": 320,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": head_dim,
            "max_position_embeddings": 2048,
            "std": 0.1,
            **overrides,
        }
        index = repr((arch, sorted(fields.items())))
        if index not in made:
            made[index] = build_tiny(tmp_path_factory.mktemp("model"), arch, **fields)
        return made[index]

    return make


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    """Between tests, so that one that measures memory is not measured by its neighbours."""
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
