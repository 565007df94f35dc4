"""A fixture that writes tiny GGUF models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tiny_gguf import write_tiny


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """`write_tiny`, into this test's folder."""
    return partial(write_tiny, tmp_path / "tiny.gguf")
