"""The tensors behind the block ids.

One pool, block-major: `[N, L, 2, B, G, D]`, so that a block is one contiguous run of bytes over all layers. The pool
can grow by mapping more memory behind a fixed address, and a connector moves a block with one copy. A layer sees
strided views `[N, B, G, D]`.

N blocks, L layers, B tokens a block, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

MARGIN = 2.0
"""By how much a value may exceed the largest that was seen in calibration. An FP8 number has the same relative error
over all its normal range, so a factor of 2 costs one of some 15 powers of two, and those at the small end."""


class LayerCache(NamedTuple):
    """What one layer reads and writes."""

    keys: torch.Tensor  # [N, B, G, D], strided
    values: torch.Tensor
    scales: torch.Tensor | None  # [2, G] float32, of keys and of values; None: they are stored as they are


class KVScales:
    """`values` [L, 2, G] float32 on the pool's device: the scales of keys and values of each layer and kv head. They
    are as fixed as weights: nothing that was written with one may be read with another.

    `largest` is the largest magnitude that the format holds.
    """

    def __init__(self, num_layers: int, num_heads: int, largest: float, device: torch.device) -> None:
        self.values = torch.ones((num_layers, 2, num_heads), dtype=torch.float32, device=device)
        self.largest = largest
        self.pending = False
        """They are not known yet: the first step sets them, before it writes."""

    def calibrate(self, layer: int, keys: torch.Tensor, values: torch.Tensor, live: torch.Tensor) -> None:
        """Sets a layer's scales so that `MARGIN` times the largest magnitude of each head of `keys` and `values`
        [T, G, D] can be stored; only where `live` [T] bool. A head without any, or with NaN or infinity, keeps its
        scale. Does not wait for the device."""
        for scale, x in zip(self.values[layer], (keys, values), strict=True):
            peak = torch.where(live[:, None, None], x.abs(), 0).amax(dim=(0, 2)).float()
            usable = (peak > 0) & peak.isfinite()
            scale.copy_(torch.where(usable, peak * (MARGIN / self.largest), scale))


class KVStorage:
    def __init__(self, pool: torch.Tensor, scales: KVScales | None = None, name: str = "") -> None:
        """`pool` is [N, L, 2, B, G, D], of the format `name`."""
        self.pool, self.scales, self.name = pool, scales, name
        self.layers = [
            LayerCache(pool[:, index, 0], pool[:, index, 1], None if scales is None else scales.values[index])
            for index in range(pool.shape[1])
        ]

    @property
    def num_blocks(self) -> int:
        return self.pool.shape[0]

    @property
    def num_layers(self) -> int:
        return self.pool.shape[1]

    @property
    def block_bytes(self) -> int:
        return self.pool[0].numel() * self.pool.element_size()

    def fill_blocks(self, block_ids: Iterable[int], value: float) -> None:
        """Overwrites whole blocks (poison in checks) with a value as the pool stores it, scales left aside."""
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=self.pool.device)
        if not index.numel():
            return
        if self.pool.element_size() > 1:
            self.pool.index_fill_(0, index, value)
        else:  # torch fills no types of one float byte by index
            pattern = torch.tensor(value).to(self.pool.dtype).view(torch.uint8).item()
            self.pool.view(torch.uint8).index_fill_(0, index, pattern)

    def cells(self, slots: torch.Tensor) -> torch.Tensor:
        """What the cache holds at `slots` [T] int64: a copy, [T, L, 2, G, D]."""
        block_size = self.pool.shape[3]
        flat = self.pool.view(torch.uint8) if self.pool.element_size() == 1 else self.pool
        return flat[slots // block_size, :, :, slots % block_size].view(self.pool.dtype)
