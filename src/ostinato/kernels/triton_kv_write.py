"""The CUDA implementation of the `kv_write` op: one program stores one token's key and value."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels.triton_kv_format import encoded
from ostinato.kernels.triton_launch import KernelCall, early, start

__all__ = ["kv_write", "kv_write_call", "kv_write_kernel"]


@triton.jit
def kv_write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    kv_scales,  # [2, G] float32
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    k_cache_stride_block,
    k_cache_stride_cell,
    k_cache_stride_head,
    v_cache_stride_block,
    v_cache_stride_cell,
    v_cache_stride_head,
    NUM_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T,). A negative slot stores nothing."""
    start(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        heads = tl.arange(0, HEADS_PAD)[:, None]
        dims = tl.arange(0, HEAD_PAD)[None, :]
        filled = (heads < NUM_HEADS) & (dims < HEAD_SIZE)
        block, cell = (slot // BLOCK_SIZE).to(tl.int64), slot % BLOCK_SIZE
        keys = tl.load(k + token * k_stride_token + heads * k_stride_head + dims, mask=filled)
        values = tl.load(v + token * v_stride_token + heads * v_stride_head + dims, mask=filled)
        k_cell = k_cache + block * k_cache_stride_block + cell * k_cache_stride_cell
        v_cell = v_cache + block * v_cache_stride_block + cell * v_cache_stride_cell
        if SCALED:
            is_head = heads < NUM_HEADS
            keys = encoded(keys, tl.load(kv_scales + heads, mask=is_head, other=1.0), k_cache.dtype.element_ty)
            value_scales = tl.load(kv_scales + NUM_HEADS + heads, mask=is_head, other=1.0)
            values = encoded(values, value_scales, v_cache.dtype.element_ty)
        tl.store(k_cell + heads * k_cache_stride_head + dims, keys.to(k_cache.dtype.element_ty), mask=filled)
        tl.store(v_cell + heads * v_cache_stride_head + dims, values.to(v_cache.dtype.element_ty), mask=filled)


def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None = None
) -> None:
    """As `reference_attention.kv_write`, for tensors whose last dimensions are contiguous."""
    kv_write_call(k, v, k_cache, v_cache, slot_mapping, kv_scales)()


def kv_write_call(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None
) -> KernelCall:
    num_tokens, num_heads, head_size = k.shape
    args = (
        k, v, k_cache, v_cache, slot_mapping, kv_scales,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
        v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
    )  # fmt: skip
    options = dict(
        NUM_HEADS=num_heads, HEADS_PAD=triton.next_power_of_2(num_heads),
        HEAD_SIZE=head_size, HEAD_PAD=triton.next_power_of_2(head_size), BLOCK_SIZE=k_cache.shape[1],
        SCALED=kv_scales is not None,
        num_warps=4 if num_heads * head_size > 256 else 1, **early(k.device),
    )  # fmt: skip
    return KernelCall(kv_write_kernel, (num_tokens,), args, options)
