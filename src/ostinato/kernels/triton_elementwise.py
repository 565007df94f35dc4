"""The CUDA implementations of the elementwise ops: norms, rotary embedding, and SwiGLU's product.

All are bound by memory or, at a few tokens, by latency: a program holds one row (or a few heads of one token) in
registers, reads it once and writes it once. Shapes and semantics: see `ops`.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.kernels.triton_launch import early, start

__all__ = ["add_rms_norm", "norm_num_warps", "rms_norm", "rms_norm_kernel", "rope", "rope_kernel", "silu_mul",
           "silu_mul_kernel"]  # fmt: skip

ROPE_HEADS = 8
"""Heads per program of the rope kernel: 512 pairs at head size 128."""
SILU_BLOCK = 1024


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T,): one row each; `out` is contiguous."""
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    scale = tl.load(weight + columns, mask=inside)
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        carried = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
        value = (carried.to(tl.float32) + value.to(tl.float32)).to(carried.dtype)
        tl.store(residual + row * residual_stride + columns, value, mask=inside)
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    result = scale * normed.to(value.dtype)
    tl.store(out + row * SIZE + columns, result.to(out.dtype.element_ty), mask=inside)


def norm_num_warps(block: int) -> int:
    """Warps for a row of `block` elements: eight for each thread, which is one 16-byte load of 16-bit numbers."""
    return min(max(block // 256, 1), 16)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    num_tokens, size = x.shape
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = triton.next_power_of_2(size)
    carried = x if residual is None else residual
    rms_norm_kernel[(num_tokens,)](
        x, carried, weight, out, eps, x.stride(0), carried.stride(0),
        SIZE=size, BLOCK=block, HAS_RESIDUAL=residual is not None, num_warps=norm_num_warps(block), **early(x.device),
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm`."""
    return _norm(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.add_rms_norm`."""
    return _norm(x, residual, weight, eps)


@triton.jit
def _load_heads(q_rows, k_rows, is_q, is_k, dims, inside):
    """Part of some heads, [heads, dims]: the first ones are queries, the others keys."""
    queries = tl.load(q_rows + dims, mask=is_q & inside, other=0.0)
    keys = tl.load(k_rows + dims, mask=is_k & inside, other=0.0)
    return tl.where(is_q, queries, keys)


@triton.jit
def _store_heads(q_rows, k_rows, is_q, is_k, dims, inside, value):
    tl.store(q_rows + dims, value.to(q_rows.dtype.element_ty), mask=is_q & inside)
    tl.store(k_rows + dims, value.to(k_rows.dtype.element_ty), mask=is_k & inside)


@triton.jit
def _scale_heads(value, inverse_rms, q_weight, k_weight, is_q, dims, inside):
    """The tail of an RMSNorm, with its two roundings; float32 again."""
    weight = tl.where(is_q, tl.load(q_weight + dims, mask=inside), tl.load(k_weight + dims, mask=inside))
    return (weight * (value.to(tl.float32) * inverse_rms).to(value.dtype)).to(value.dtype)


@triton.jit
def rope_kernel(
    q,
    k,
    positions,
    cos_sin,
    q_weight,
    k_weight,
    eps,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    cos_sin_stride,
    NUM_Q: tl.constexpr,
    NUM_K: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T, (H + G) / HEADS): some heads of one token. REST_PAD: the dimensions that do not turn, 0 if there are
    none."""
    start(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    is_q = heads < NUM_Q
    is_k = (heads >= NUM_Q) & (heads < NUM_Q + NUM_K)
    q_rows = q + token * q_stride_token + heads * q_stride_head
    k_rows = k + token * k_stride_token + (heads - NUM_Q) * k_stride_head
    dims = tl.arange(0, HALF_PAD)[None, :]
    inside = dims < HALF

    angles = cos_sin + tl.load(positions + token).to(tl.int64) * cos_sin_stride
    cos = tl.load(angles + dims, mask=inside, other=0.0)
    sin = tl.load(angles + HALF + dims, mask=inside, other=0.0)
    left = _load_heads(q_rows, k_rows, is_q, is_k, dims, inside)
    right = _load_heads(q_rows, k_rows, is_q, is_k, dims + HALF, inside)
    if NORM:
        squares = tl.sum(left.to(tl.float32) * left.to(tl.float32), 1, keep_dims=True)
        squares += tl.sum(right.to(tl.float32) * right.to(tl.float32), 1, keep_dims=True)
        if REST_PAD > 0:
            rest_dims = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
            rest_inside = rest_dims < HEAD_SIZE
            rest = _load_heads(q_rows, k_rows, is_q, is_k, rest_dims, rest_inside)
            squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1, keep_dims=True)
        inverse_rms = tl.rsqrt(squares / HEAD_SIZE + eps)
        left = _scale_heads(left, inverse_rms, q_weight, k_weight, is_q, dims, inside)
        right = _scale_heads(right, inverse_rms, q_weight, k_weight, is_q, dims + HALF, inside)
        if REST_PAD > 0:
            rest = _scale_heads(rest, inverse_rms, q_weight, k_weight, is_q, rest_dims, rest_inside)
            _store_heads(q_rows, k_rows, is_q, is_k, rest_dims, rest_inside, rest)
    wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
    turned_left = wide_left * cos - wide_right * sin
    turned_right = wide_right * cos + wide_left * sin
    _store_heads(q_rows, k_rows, is_q, is_k, dims, inside, turned_left)
    _store_heads(q_rows, k_rows, is_q, is_k, dims + HALF, inside, turned_right)


def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> None:
    """See `ops.rope`."""
    num_tokens, num_q, head_size = q.shape
    num_k, rotated = k.shape[1], cos_sin.shape[1]
    norm = q_weight is not None
    if num_tokens == 0:
        return
    rope_kernel[(num_tokens, triton.cdiv(num_q + num_k, ROPE_HEADS))](
        q, k, positions, cos_sin, q_weight, k_weight, eps,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos_sin.stride(0),
        NUM_Q=num_q, NUM_K=num_k, HEAD_SIZE=head_size, HALF=rotated // 2,
        HALF_PAD=triton.next_power_of_2(rotated // 2),
        REST_PAD=triton.next_power_of_2(head_size - rotated) if norm and rotated < head_size else 0,
        HEADS=ROPE_HEADS, NORM=norm, num_warps=4, **early(q.device),
    )  # fmt: skip


@triton.jit
def silu_mul_kernel(gate_up, out, size, gate_up_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (T, I / BLOCK); `out` is contiguous."""
    start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up + row * gate_up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + size + columns, mask=inside, other=0.0)
    silu = (gate / (1.0 + tl.exp(-gate))).to(up.dtype)
    tl.store(out + row * size + columns, silu * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `ops.silu_mul`."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens == 0:
        return out
    silu_mul_kernel[(num_tokens, triton.cdiv(size, SILU_BLOCK))](
        gate_up, out, size, gate_up.stride(0), BLOCK=SILU_BLOCK, num_warps=4, **early(gate_up.device)
    )
    return out
