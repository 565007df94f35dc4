"""The ops that move whole KV blocks, or wait for those that move. Part of `ops`, which is what others import.

The legend is there; E bytes of a block's layer, L layers.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ostinato.kernels.op_library import Op, no_output, register

__all__ = ["copy_blocks", "gather_blocks", "wait_loaded"]


_OPS: Final = (
    Op(
        "copy_blocks",
        "reference_blocks",
        "triton_blocks",
        "(Tensor source, Tensor(a!) target, Tensor source_ids, Tensor target_ids, int first_layer, int num_layers) "
        "-> ()",
        no_output,
    ),
    Op(
        "gather_blocks",
        "reference_blocks",
        "triton_gather",
        "(Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor row_slot, Tensor seq_lens, int num_rows, "
        "Tensor(a!) keys, Tensor(b!) values) -> ()",
        no_output,
    ),
    Op("wait_loaded", "reference_blocks", None, "(Tensor(a!) pending, int layer) -> ()", no_output),
)

register(_OPS)

_copy_blocks: Final = torch.ops.ostinato.copy_blocks.default
_gather_blocks: Final = torch.ops.ostinato.gather_blocks.default
_wait_loaded: Final = torch.ops.ostinato.wait_loaded.default


def copy_blocks(
    source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor, first_layer: int, num_layers: int
) -> None:
    """Copies layers `first_layer` to `first_layer + num_layers` of whole KV blocks, as bytes.

    `source [N1, L, E]` uint8, `target! [N2, L, E]` uint8, `source_ids [n]`, `target_ids [n]`: block `source_ids[i]`
    goes to block `target_ids[i]`. Either tensor may lie in pinned host memory, the ids are where the other one is. E is
    a multiple of 8. Ids must be valid, and those of the target differ.
    """
    _copy_blocks(source, target, source_ids, target_ids, first_layer, num_layers)


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
    """Copies each row's blocks to a place of the row's own, in order and as stored.

    `k_cache [N, B, G, D]`, `v_cache [N, B, G, D]`, `keys! [R * W, B, G, D]`, `values! [R * W, B, G, D]`, each block of
    which is contiguous; `block_table [S, W]`, `row_slot [>=num_rows]`, `seq_lens [>=num_rows]`. Block w of row r, if it
    holds one of the row's first `seq_lens[r]` positions, goes to block `r * W + w`, whole. Nothing else is read, table
    entries included, or written: a row of length 0 costs a look at its length.
    """
    _gather_blocks(k_cache, v_cache, block_table, row_slot, seq_lens, num_rows, keys, values)


def wait_loaded(pending: Tensor, layer: int) -> None:
    """CPU only: returns when `pending[layer]`, which another thread writes, is 0. On CUDA an event does this.

    `pending [L]`. Raises OstinatoError where it becomes negative: what was waited for will not come.
    """
    _wait_loaded(pending, layer)
