"""How the KV cache stores a key or value: the formats, and what they mean in plain torch.

A format with scales keeps `stored = clamp(x / scale, -largest, largest)`, rounded to its dtype, and reads it as
`stored * scale`, with one float32 scale for the keys and one for the values of each layer and kv head. The other
formats keep values as they are. Kernels take a format as what it consists of: the dtype of the pool, and the scales.

FP8 E4M3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022): 1 sign, 4 exponent and 3 mantissa bits, largest
value 448, no infinities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

__all__ = ["FP8_E4M3", "KVFormat", "decode", "encode", "kv_format"]


@dataclass(frozen=True, slots=True)
class KVFormat:
    """`dtype` of the pool. `largest` magnitude that it holds, for formats with scales; None: values as they are."""

    name: str
    dtype: torch.dtype
    largest: float | None = None

    @property
    def has_scales(self) -> bool:
        return self.largest is not None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


FP8_E4M3: Final = KVFormat("fp8_e4m3", torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max)

_BY_NAME: Final = {"fp8": FP8_E4M3, "fp8_e4m3": FP8_E4M3}


def kv_format(name: str, dtype: torch.dtype) -> KVFormat:
    """The format that the option `kv_cache_dtype` names; "auto" is the model's `dtype`."""
    return _BY_NAME[name] if name != "auto" else KVFormat(str(dtype).removeprefix("torch."), dtype)


def encode(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a pool of `dtype` stores of `x` under `scale`, float32, which broadcasts to it. NaN stays NaN; what is too
    large for a format of one byte becomes its largest value."""
    if scale is None:
        return x.to(dtype)
    scaled = x.float() / scale
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        scaled = scaled.clamp(-largest, largest)
    return scaled.to(dtype)


def decode(stored: Tensor, scale: Tensor | None) -> Tensor:
    """What was `stored` under `scale`, which broadcasts to it, as float32."""
    return stored.float() if scale is None else stored.float() * scale
