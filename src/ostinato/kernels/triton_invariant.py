"""CUDA implementations of the batch-invariant ops: one kernel, one tile and one order of sums for any number of rows.

What makes a product's bits depend on its batch is that a library picks tile, instruction and split of K by the number
of rows (He et al., "Defeating Nondeterminism in LLM Inference", 2025). Here they follow from the dtype alone. A program
computes a tile of outputs by one walk over K, in order; rows that are missing are zeros, and no output element's sum
has anything to do with another's. A row's place in a tile changes nothing either: a matrix instruction sums all its
rows in the same order. Attention is the ragged kernel for decoding rows too: without splits, with a tile of queries of
one height, and tiles of keys that begin at position 0.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels.triton_attention_prefill import prefill_call
from ostinato.kernels.triton_elementwise import silu_mul as invariant_silu_mul  # its tiles follow from the width alone
from ostinato.kernels.triton_launch import early, start

__all__ = [
    "LinearConfig",
    "invariant_attention",
    "invariant_linear",
    "invariant_linear_kernel",
    "invariant_silu_mul",
    "linear_config",
]


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Compile-time choices of the product, a function of the dtype alone."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def tile(self) -> dict[str, int]:
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}


def linear_config(element_size: int) -> LinearConfig:
    """64 rows in 16-bit types, the least that a warpgroup's instruction takes; small tiles for float32, which has no
    exact tensor core path and unrolls into scalar products, whose registers grow with the tile."""
    if element_size > 2:
        return LinearConfig(block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=2)
    return LinearConfig(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4)


@triton.jit(do_not_specialize=["num_rows"])
def invariant_linear_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_out,
    x_stride,
    out_stride,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (cdiv(T, BLOCK_M), cdiv(N, BLOCK_N)): programs that run together share a tile of the weight [N, SIZE]."""
    start(PDL)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = rows < num_rows, outputs < num_out
    inputs = tl.arange(0, BLOCK_K)
    x_tile = x + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    weight_tile = weight + outputs.to(tl.int64)[None, :] * SIZE + inputs[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, SIZE, BLOCK_K):
        x_mask, weight_mask = is_row[:, None], is_output[None, :]
        if SIZE % BLOCK_K != 0:
            x_mask = x_mask & (first + inputs < SIZE)[None, :]
            weight_mask = weight_mask & (first + inputs < SIZE)[:, None]
        left = tl.load(x_tile + first, mask=x_mask, other=0.0)
        right = tl.load(weight_tile + first, mask=weight_mask, other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    target = out + rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """See `ops.invariant_linear`."""
    (num_rows, size), num_out = x.shape, weight.shape[0]
    if num_rows == 0:
        return
    config = linear_config(x.element_size())
    grid = (triton.cdiv(num_rows, config.block_m), triton.cdiv(num_out, config.block_n))
    invariant_linear_kernel[grid](
        x, weight, bias, out, num_rows, num_out, x.stride(0), out.stride(0),
        SIZE=size, HAS_BIAS=bias is not None, **config.tile(), **early(x.device),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


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
    """See `ops.invariant_attention`."""
    over = (q, k_cache, v_cache, block_table, row_slot, query_start, seq_lens, scale, num_rows, out)
    prefill_call(*over, kv_scales, invariant=True)()
