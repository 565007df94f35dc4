"""Torch implementations of the batch-invariant ops: what they compute for a token depends on that token alone.

BLAS promises equal bits only for equal calls: which kernel it picks, and so the order of its sums, depends on the
number of rows, and on small matrices even on a row's place among them. So each row is a call of its own, whose shapes,
strides and alignment follow from the row's own sizes. Shapes: see `ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.kernels.kv_formats import decode
from ostinato.kernels.reference_attention import live_rows

__all__ = ["invariant_attention", "invariant_linear", "invariant_silu_mul"]


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """See `ops.invariant_linear`."""
    num_out, size = weight.shape
    wide_weight = weight.float()
    wide_bias = None if bias is None else bias.float()
    # The vectors are copied to one place and back: rows of `x` and `out` are aligned one way or another.
    row, product = torch.empty(size, device=x.device), torch.empty(num_out, device=x.device)
    for t in range(x.shape[0]):
        row.copy_(x[t])
        torch.mv(wide_weight, row, out=product)
        if wide_bias is not None:
            product += wide_bias
        out[t] = product


def invariant_silu_mul(gate_up: Tensor) -> Tensor:
    """See `ops.invariant_silu_mul`. Torch's vectorised exp and the scalar one that ends a thread's share differ in the
    last bit, so where shares end must not depend on the number of rows."""
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    for row, (gate, up) in zip(out, (halves.chunk(2) for halves in gate_up), strict=True):
        torch.mul(torch.nn.functional.silu(gate), up, out=row)
    return out


def invariant_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    num_rows: int,
    out: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """See `ops.invariant_attention`. One call per token; as in `attention`, nothing behind a row's length is read."""
    num_heads, head_size = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    capacity = block_table.shape[1] * block_size
    k_scale, v_scale = (None, None) if kv_scales is None else kv_scales.unsqueeze(-1)  # [G, 1] each
    out.zero_()
    for row in live_rows(row_slot, query_start, seq_lens, 0, num_rows, num_tokens=q.shape[0]):
        length = min(row.seq_len, capacity)
        blocks = block_table[row.slot, : -(-length // block_size)]
        keys, values = (
            decode(cache.index_select(0, blocks).flatten(0, 1), scale_of)
            for cache, scale_of in ((k_cache, k_scale), (v_cache, v_scale))
        )
        for token in range(row.start, row.end):
            visible = min(row.seq_len - row.end + token + 1, length)
            if visible > 0:
                query = (q[token].float() * scale).view(num_kv_heads, num_heads // num_kv_heads, head_size)
                seen_keys = keys[:visible].permute(1, 2, 0).contiguous()  # [G, D, visible]
                seen_values = values[:visible].transpose(0, 1).contiguous()  # [G, visible, D]
                weights = torch.softmax(torch.matmul(query, seen_keys), dim=-1)
                out[token] = torch.matmul(weights, seen_values).view(num_heads, head_size)
