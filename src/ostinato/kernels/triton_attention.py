"""The CUDA implementation of the `attention` op: one kernel for short queries of one length, one for all others."""

from __future__ import annotations

from torch import Tensor

from ostinato.kernels.triton_attention_decode import MAX_QUERY_LEN, decode_attention
from ostinato.kernels.triton_attention_prefill import prefill_attention

__all__ = ["attention"]


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    query_len: int,
    num_rows: int,
    num_splits: int,
    out: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """As `reference_attention.attention`. The grid follows from the arguments' shapes and the ints alone."""
    if 0 < query_len <= MAX_QUERY_LEN:
        decode_attention(
            q, k_cache, v_cache, block_table, row_slot, seq_lens, scale, query_len, num_rows, num_splits, out, kv_scales
        )
    else:
        prefill_attention(
            q, k_cache, v_cache, block_table, row_slot, query_start, seq_lens, scale, num_rows, out, kv_scales
        )
