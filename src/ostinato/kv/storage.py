"""The tensors behind the block ids.

One pool, block-major: `[N, L, 2, B, G, D]`, so that a block is one contiguous run of bytes over all layers. The pool
can grow by mapping more memory behind a fixed address, and a connector moves a block with one copy. A layer sees
strided views `[N, B, G, D]`.

N blocks, L layers, B tokens a block, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class KVStorage:
    def __init__(self, pool: torch.Tensor) -> None:
        """`pool` is [N, L, 2, B, G, D]."""
        self.pool = pool
        self.layers = [(pool[:, index, 0], pool[:, index, 1]) for index in range(pool.shape[1])]

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
        """Overwrites whole blocks (poison in checks)."""
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=self.pool.device)
        if index.numel():
            self.pool.index_fill_(0, index, value)
