"""KV blocks that move: copies of whole blocks, and waiting for one. CPU implementations, and the copies' oracle.

Legend: N blocks, L layers, B block size, G key/value heads, D head size, R rows of a step, S state rows, W table width.
"""

from __future__ import annotations

import time

from torch import Tensor

from ostinato.errors import OstinatoError

__all__ = ["copy_blocks", "gather_blocks", "wait_loaded"]

_LOOK_S = 50e-6


def copy_blocks(
    source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor, first_layer: int, num_layers: int
) -> None:
    """source [N1, L, E], target [N2, L, E] uint8; source_ids, target_ids [n] int32."""
    layers = slice(first_layer, first_layer + num_layers)
    target[target_ids.long(), layers] = source[source_ids.long(), layers]


def gather_blocks(
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    seq_lens: Tensor,
    num_rows: int,
    keys: Tensor,
    values: Tensor,
) -> None:
    """k_cache, v_cache [N, B, G, D]; block_table [S, W]; row_slot, seq_lens [>= num_rows]; keys, values
    [R * W, B, G, D], of the caches' type."""
    block_size, width = k_cache.shape[1], block_table.shape[1]
    rows = zip(row_slot[:num_rows].tolist(), seq_lens[:num_rows].tolist(), strict=True)
    for row, (slot, length) in enumerate(rows):
        count = min(-(-length // block_size), width)
        if count > 0:
            blocks = block_table[slot, :count]
            for cache, target in ((k_cache, keys), (v_cache, values)):
                target[row * width : row * width + count] = cache.index_select(0, blocks)


def wait_loaded(pending: Tensor, layer: int) -> None:
    """pending [L] int32. Looks every 50 us, because what it waits for is another thread's."""
    while (state := int(pending[layer])) > 0:
        time.sleep(_LOOK_S)
    if state < 0:
        raise OstinatoError(f"the KV of layer {layer} could not be loaded; the log says why")
