"""The CUDA implementation of the `rope_write` op: q turned where it is, k turned and v as it is into the cache, in one
launch, before attention that reads every key from the cache."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.kernels.triton_kv_format import encoded
from ostinato.kernels.triton_launch import KernelCall, early

__all__ = ["rope_write", "rope_write_call", "rope_write_kernel"]

_HEADS = (4, 16)
"""Heads of a program: few where there are few tokens, and many where there would be many programs."""
_MANY_TOKENS = 64


@triton.jit
def _load(heads, dims, live, inside):
    return tl.load(heads + dims, mask=live & inside, other=0.0)


@triton.jit
def _scale(value, inverse_rms, weight, dims, inside):
    """The tail of an RMSNorm, with its two roundings."""
    normed = (value.to(tl.float32) * inverse_rms).to(value.dtype)
    return (tl.load(weight + dims, mask=inside, other=0.0) * normed).to(value.dtype)


@triton.jit
def _stored(value, units, DTYPE: tl.constexpr, SCALED: tl.constexpr):
    if SCALED:
        return encoded(value, units, DTYPE)
    else:
        return value.to(DTYPE)


@triton.jit
def _turned(
    rows,  # pointers [HEADS, 1]
    weight,
    angles,
    live,
    eps,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    NORM: tl.constexpr,
):
    """Heads with norm and rotation: first halves, second halves, and what does not turn (the first again, if that is
    nothing)."""
    dims = tl.arange(0, HALF_PAD)[None, :]
    inside = dims < HALF
    cos = tl.load(angles + dims, mask=inside, other=0.0)
    sin = tl.load(angles + HALF + dims, mask=inside, other=0.0)
    left, right = _load(rows, dims, live, inside), _load(rows, dims + HALF, live, inside)
    rest = left
    if REST_PAD > 0:
        rest_dims = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
        rest = _load(rows, rest_dims, live, rest_dims < HEAD_SIZE)
    if NORM:
        wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
        squares = tl.sum(wide_left * wide_left, 1, keep_dims=True)
        squares += tl.sum(wide_right * wide_right, 1, keep_dims=True)
        if REST_PAD > 0:
            squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1, keep_dims=True)
        inverse_rms = tl.rsqrt(squares / HEAD_SIZE + eps)
        left = _scale(left, inverse_rms, weight, dims, inside)
        right = _scale(right, inverse_rms, weight, dims + HALF, inside)
        if REST_PAD > 0:
            rest = _scale(rest, inverse_rms, weight, rest_dims, rest_dims < HEAD_SIZE)
    wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
    turned_left = (wide_left * cos - wide_right * sin).to(left.dtype)
    turned_right = (wide_right * cos + wide_left * sin).to(left.dtype)
    return turned_left, turned_right, rest


@triton.jit
def _store(
    target, left, right, rest, live, HEAD_SIZE: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, HALF_PAD)[None, :]
    tl.store(target + dims, left, mask=live & (dims < HALF))
    tl.store(target + HALF + dims, right, mask=live & (dims < HALF))
    if REST_PAD > 0:
        rest_dims = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
        tl.store(target + rest_dims, rest, mask=live & (rest_dims < HEAD_SIZE))


@triton.jit
def rope_write_kernel(
    q,
    k,
    v,
    positions,
    cos_sin,
    q_weight,
    k_weight,
    slot_mapping,
    k_cache,
    v_cache,
    kv_scales,  # [2, G] float32
    eps,
    cos_sin_stride,
    q_stride_token,
    q_stride_head,
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
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (T, H / HEADS + G / HEADS + G / HEADS, each rounded up): some heads of one token, of q, of k or of v.
    REST_PAD: the dimensions of a key or query that do not turn, 0 if there are none. A negative slot stores nothing."""
    if PDL:
        gdc_wait()
        # Not before: attention's programs would take places unevenly from the ones of the layer before.
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    of_q: tl.constexpr = (NUM_Q + HEADS - 1) // HEADS
    of_kv: tl.constexpr = (NUM_KV + HEADS - 1) // HEADS
    part = tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    block, cell = (slot // BLOCK_SIZE).to(tl.int64), slot % BLOCK_SIZE
    if part >= of_q + of_kv:
        heads = (part - of_q - of_kv) * HEADS + tl.arange(0, HEADS)[:, None]
        dims = tl.arange(0, HEAD_PAD)[None, :]
        filled = (heads < NUM_KV) & (dims < HEAD_SIZE) & (slot >= 0)
        value = tl.load(v + token * v_stride_token + heads * v_stride_head + dims, mask=filled, other=0.0)
        units = tl.load(kv_scales + NUM_KV + heads, mask=heads < NUM_KV, other=1.0) if SCALED else 1.0
        cells = v_cache + block * v_cache_stride_block + cell * v_cache_stride_cell + heads * v_cache_stride_head
        tl.store(cells + dims, _stored(value, units, v_cache.dtype.element_ty, SCALED), mask=filled)
        return
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * cos_sin_stride
    if part < of_q:
        heads = part * HEADS + tl.arange(0, HEADS)[:, None]
        live = heads < NUM_Q
        rows = q + token * q_stride_token + heads * q_stride_head
        left, right, rest = _turned(rows, q_weight, angles, live, eps, HEAD_SIZE, HALF, HALF_PAD, REST_PAD, NORM)
        _store(rows, left, right, rest, live, HEAD_SIZE, HALF, HALF_PAD, REST_PAD)
    else:
        heads = (part - of_q) * HEADS + tl.arange(0, HEADS)[:, None]
        live = heads < NUM_KV
        rows = k + token * k_stride_token + heads * k_stride_head
        left, right, rest = _turned(rows, k_weight, angles, live, eps, HEAD_SIZE, HALF, HALF_PAD, REST_PAD, NORM)
        units = tl.load(kv_scales + heads, mask=live, other=1.0) if SCALED else 1.0
        cells = k_cache + block * k_cache_stride_block + cell * k_cache_stride_cell + heads * k_cache_stride_head
        stored_left = _stored(left, units, k_cache.dtype.element_ty, SCALED)
        stored_right = _stored(right, units, k_cache.dtype.element_ty, SCALED)
        stored_rest = _stored(rest, units, k_cache.dtype.element_ty, SCALED)
        filled = live & (slot >= 0)
        _store(cells, stored_left, stored_right, stored_rest, filled, HEAD_SIZE, HALF, HALF_PAD, REST_PAD)


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """See `ops.rope_write`."""
    if q.shape[0] > 0:
        rope_write_call(q, k, v, positions, cos_sin, q_norm, k_norm, eps, slot_mapping, k_cache, v_cache, kv_scales)()


def rope_write_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_scales: Tensor | None,
) -> KernelCall:
    """The one launch of `rope_write`."""
    num_tokens, num_q, head_size = q.shape
    num_kv, rotated = k.shape[1], cos_sin.shape[1]
    heads = _HEADS[num_tokens > _MANY_TOKENS]
    blocks = triton.cdiv(num_q, heads) + 2 * triton.cdiv(num_kv, heads)
    args = (
        q, k, v, positions, cos_sin, q_norm, k_norm, slot_mapping, k_cache, v_cache, kv_scales, eps,
        cos_sin.stride(0), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3],
        *v_cache.stride()[:3],
    )  # fmt: skip
    options = dict(
        NUM_Q=num_q, NUM_KV=num_kv, HEAD_SIZE=head_size, HEAD_PAD=triton.next_power_of_2(head_size),
        HALF=rotated // 2, HALF_PAD=triton.next_power_of_2(rotated // 2),
        REST_PAD=triton.next_power_of_2(head_size - rotated) if rotated < head_size else 0,
        HEADS=heads, NORM=q_norm is not None, BLOCK_SIZE=k_cache.shape[1], SCALED=kv_scales is not None,
        num_warps=4, **early(q.device),
    )  # fmt: skip
    return KernelCall(rope_write_kernel, (num_tokens, blocks), args, options)
