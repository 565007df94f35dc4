"""KV blocks that move: copies of whole blocks, and waiting for one. CPU implementations, and the copies' oracle."""

from __future__ import annotations

import time

from torch import Tensor

from ostinato.errors import OstinatoError

__all__ = ["copy_blocks", "wait_loaded"]

_LOOK_S = 50e-6


def copy_blocks(
    source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor, first_layer: int, num_layers: int
) -> None:
    """source [N1, L, E], target [N2, L, E] uint8; source_ids, target_ids [n] int32."""
    layers = slice(first_layer, first_layer + num_layers)
    target[target_ids.long(), layers] = source[source_ids.long(), layers]


def wait_loaded(pending: Tensor, layer: int) -> None:
    """pending [L] int32. Looks every 50 us, because what it waits for is another thread's."""
    while (state := int(pending[layer])) > 0:
        time.sleep(_LOOK_S)
    if state < 0:
        raise OstinatoError(f"the KV of layer {layer} could not be loaded; the log says why")
