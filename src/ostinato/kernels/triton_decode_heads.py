"""What the fused decode kernel does to heads in registers, as the rope kernel does it in memory: RMSNorm of each head
and rotary embedding, with the same roundings. And the prefetch that hides the first tile of the cache behind it.

A rotation pairs dimension i with i + HALF. A program holds each head twice, the second time with partners exchanged.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_angles", "load_pairs", "normed", "prefetch_tile", "turned"]


@triton.jit
def _partners(HEAD_PAD: tl.constexpr, HALF: tl.constexpr, VECTOR: tl.constexpr):
    """[1, HEAD_PAD]: the dimension that each one turns with; itself from 2 HALF on. The hints keep loads vectorised."""
    dims = tl.arange(0, HEAD_PAD)
    partner = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
    return tl.max_contiguous(tl.multiple_of(partner, VECTOR), VECTOR)[None, :]


@triton.jit
def load_angles(angles, HEAD_PAD: tl.constexpr, HALF: tl.constexpr, VECTOR: tl.constexpr):
    """Cosines and sines of every dimension, [n, HEAD_PAD], from pointers to rows of the table, [n, 1] or one for all.
    The sine has the sign with which the partner enters; dimensions that do not turn get 1 and 0."""
    dims = tl.arange(0, HEAD_PAD)
    pair = tl.where(dims < HALF, dims, dims - HALF)
    pair = tl.max_contiguous(tl.multiple_of(pair, VECTOR), VECTOR)[None, :]
    turns = (dims < 2 * HALF)[None, :]
    cos = tl.load(angles + pair, mask=turns, other=1.0)
    sin = tl.load(angles + HALF + pair, mask=turns, other=0.0)
    return cos, tl.where((dims < HALF)[None, :], -sin, sin)


@triton.jit
def load_pairs(
    heads, live, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, HALF: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """Heads at pointers [n, 1], and each dimension's partner; zeros where not live. Loading twice hits L1 and saves an
    exchange between threads."""
    dims = tl.arange(0, HEAD_PAD)[None, :]
    inside = live & (dims < HEAD_SIZE)
    value = tl.load(heads + dims, mask=inside, other=0.0)
    return value, tl.load(heads + _partners(HEAD_PAD, HALF, VECTOR), mask=inside, other=0.0)


@triton.jit
def normed(value, other, scale, other_scale, eps, HEAD_SIZE: tl.constexpr):
    """RMSNorm of heads and of their partners' copy, with the rope kernel's roundings."""
    wide = value.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True) / HEAD_SIZE + eps)
    value = (scale * (wide * inverse_rms).to(value.dtype)).to(value.dtype)
    return value, (other_scale * (other.to(tl.float32) * inverse_rms).to(other.dtype)).to(other.dtype)


@triton.jit
def turned(value, other, cos, sin, NATIVE: tl.constexpr):
    """The rotation in float32, rounded once. NATIVE: not in the interpreter, which has no inline assembly."""
    result = (value.to(tl.float32) * cos + other.to(tl.float32) * sin).to(value.dtype)
    if NATIVE:
        # What the compiler does not see through it cannot move: without this it turns keys in the layout of the matrix
        # product that follows, every element once per warp, which takes twice the registers and spills at D = 256.
        pack: tl.constexpr = 32 // result.dtype.primitive_bitwidth
        result = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [result], result.dtype, is_pure=False, pack=pack)
    return result


@triton.jit
def prefetch_tile(
    k_head,
    v_head,
    table,
    first,
    k_stride_block,
    k_stride_cell,
    v_stride_block,
    v_stride_cell,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Asks L2 for the cells [first, first + TILE), all of which must exist, a 128-byte line at a time."""
    positions = first + tl.arange(0, TILE)
    blocks = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
    cells = positions % BLOCK_SIZE
    line: tl.constexpr = 1024 // k_head.dtype.element_ty.primitive_bitwidth
    for begin in tl.static_range(0, HEAD_SIZE, line):
        _prefetch(k_head + blocks * k_stride_block + cells * k_stride_cell + begin)
        _prefetch(v_head + blocks * v_stride_block + cells * v_stride_cell + begin)


@triton.jit
def _prefetch(pointers):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )
