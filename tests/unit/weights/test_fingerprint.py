"""The name of tensors by all of their bits. n values."""

from __future__ import annotations

import pytest
import torch

from ostinato.weights import fingerprint
from ostinato.weights.fingerprint import full_fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_every_value_counts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_CHUNK", 8)
    values = torch.arange(21).to(dtype)
    names = {full_fingerprint([("w", values)]), full_fingerprint([("v", values)])}
    names.add(full_fingerprint([("w", values.view(3, 7))]))
    for place in range(21):
        changed = values.clone()
        changed[place] += 1
        names.add(full_fingerprint([("w", changed)]))
    swapped = values.clone()
    swapped[[1, 2, 9]] = values[[2, 9, 1]]
    names.add(full_fingerprint([("w", swapped)]))
    assert len(names) == 2 + 1 + 21 + 1
    assert full_fingerprint([("w", values.clone())]) in names


def test_it_is_what_it_was_in_other_processes() -> None:
    values = torch.arange(1000, dtype=torch.float32).view(10, 100)
    tensors = [("a", values), ("b", torch.zeros(0)), ("c", torch.ones(3))]
    assert full_fingerprint(tensors) == "60c79758a9086bf1cafb5991289beae9"
    strided = values.t().contiguous().t()
    assert full_fingerprint([("a", strided), *tensors[1:]]) == "60c79758a9086bf1cafb5991289beae9"
