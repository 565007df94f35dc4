"""The seam between checkpoints and models: what every container format offers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ostinato.tokenizer.tokenizer import Tokenizer


class TensorInfo(NamedTuple):
    """Shape and dtype of a tensor as `tensors()` will yield it (after dequantisation, if any)."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint(Protocol):
    """A model at rest. Opening one reads headers only; every name is Hugging Face's.

    Tensors may share memory with the file (copy on write): copy them into the model's own storage, and drop them.
    """

    @property
    def path(self) -> Path:
        """The folder or file that was opened."""

    @property
    def config(self) -> Mapping[str, Any]:
        """`config.json`, or the same keys made from the file's metadata."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """`generation_config.json`, or the same keys made from the file's metadata; empty when there is none."""

    @property
    def total_bytes(self) -> int:
        """Bytes of tensor data as stored, which is what loading reads (quantised formats grow afterwards)."""

    def tensor_infos(self) -> dict[str, TensorInfo]:
        """Name to shape and dtype, without reading any tensor data. Empty for the `dummy` format."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once, in file order. Raises WeightError where the data cannot be read."""

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that belongs to the model, built anew on each call; None when the checkpoint has none."""
