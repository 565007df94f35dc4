"""`contents_name`: blocks that leave the process are named by model, format and scales."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.config import EngineConfig
from ostinato.engine.parts import contents_name
from ostinato.errors import ConfigError
from ostinato.kernels.kv_formats import FP8_E4M3, KVFormat, kv_format
from ostinato.kv.storage import KVScales, KVStorage
from ostinato.tokenizer.tokenizer import Tokenizer
from ostinato.weights.base import TensorInfo

CPU = torch.device("cpu")


class OneTensor:
    """A checkpoint with a single parameter."""

    path, generation_config, total_bytes = Path("somewhere"), dict[str, Any](), 16
    config = {"model_type": "llama"}  # noqa: RUF012

    def __init__(self, value: float = 1.0) -> None:
        self._tensor = torch.full((4,), value)

    def tensor_infos(self) -> dict[str, TensorInfo]:
        return {"w": TensorInfo((4,), torch.float32)}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", self._tensor

    def tokenizer(self) -> Tokenizer | None:
        return None


def storage_of(form: KVFormat, scale: float | None = None) -> KVStorage:
    """Two layers, two heads; `scale` None: still to be calibrated."""
    scales = None
    if form.largest is not None:
        scales = KVScales(2, 2, form.largest, CPU)
        scales.pending = scale is None
        scales.values.fill_(scale or 1.0)
    return KVStorage(torch.zeros((3, 2, 2, 16, 2, 8), dtype=form.dtype), scales, form.name)


def name_of(storage: KVStorage, checkpoint: OneTensor | None = None, **options: Any) -> str:
    return contents_name(EngineConfig(model="m", **options), checkpoint or OneTensor(), storage)


def test_the_same_contents_have_one_name() -> None:
    assert name_of(storage_of(FP8_E4M3, 0.5)) == name_of(storage_of(FP8_E4M3, 0.5))
    form = kv_format("auto", torch.bfloat16)
    assert name_of(storage_of(form)) == name_of(storage_of(form))


def test_a_format_has_a_name_of_its_own() -> None:
    forms = [kv_format("auto", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    names = {name_of(storage_of(form, 1.0)) for form in (*forms, FP8_E4M3)}
    assert len(names) == 4
    assert name_of(storage_of(kv_format("fp8", torch.bfloat16), 1.0)) in names, "fp8 and fp8_e4m3 are one"


@pytest.mark.parametrize("place", [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1)])
def test_any_other_scale_gives_another_name(place: tuple[int, int, int]) -> None:
    storage = storage_of(FP8_E4M3, 0.5)
    before = name_of(storage)
    assert storage.scales is not None
    storage.scales.values[place] = torch.nextafter(torch.tensor(0.5), torch.tensor(1.0))
    assert name_of(storage) != before
    storage.scales.values[place] = 0.5
    assert name_of(storage) == before


def test_another_model_has_another_name() -> None:
    storage = storage_of(FP8_E4M3, 0.5)
    names = {
        name_of(storage),
        name_of(storage, OneTensor(2.0)),
        name_of(storage, batch_invariant=True),
        name_of(storage, load_format="dummy"),
        name_of(storage, load_format="dummy", seed=1),
    }
    assert len(names) == 5


def test_scales_that_are_not_known_yet_have_no_name() -> None:
    """Both remedies that the message names help."""
    storage = storage_of(FP8_E4M3)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='fp8': .*k_scale and v_scale, or calculate_kv_scales=False"):
        name_of(storage, kv_cache_dtype="fp8")
    assert storage.scales is not None
    storage.scales.pending = False
    assert name_of(storage, kv_cache_dtype="fp8") == name_of(storage_of(FP8_E4M3, 1.0))
