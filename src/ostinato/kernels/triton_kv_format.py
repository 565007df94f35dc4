"""What `kv_formats.encode` does, for the kernels that write the cache. Reading needs no counterpart: the stored values
become those of the queries' type, and scales of keys and values, one for each kv head, go into the softmax scale and
the output."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["encoded"]


@triton.jit
def encoded(x, scale, DTYPE: tl.constexpr):
    """What a pool of DTYPE stores of `x` under `scale`, which broadcasts to it."""
    scaled = x.to(tl.float32) / scale
    if tl.float8e4nv == DTYPE:
        scaled = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(DTYPE)
