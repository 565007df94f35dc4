"""What `kv_formats.encode` does, for the kernels that write the cache, and what type those that read it compute in.
Scales of keys and values, one for each kv head, go into the softmax scale and the output."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["encoded", "operand"]


@triton.jit
def encoded(x, scale, DTYPE: tl.constexpr):
    """What a pool of DTYPE stores of `x` under `scale`, which broadcasts to it."""
    scaled = x.to(tl.float32) / scale
    if tl.float8e4nv == DTYPE:
        scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(DTYPE)


@triton.jit
def operand(x, QUERY_TYPE: tl.constexpr, SCALED: tl.constexpr):
    """Queries, or keys and values as stored, for the matrix products. With a scaled cache bfloat16 gives way to
    float16: eight-bit floats become that in one instruction for two, where bfloat16 takes five. It rounds less, and its
    range is far beyond that of queries and of what is stored."""
    if SCALED and tl.bfloat16 == QUERY_TYPE:
        return x.to(tl.float16)
    else:
        return x.to(QUERY_TYPE)
