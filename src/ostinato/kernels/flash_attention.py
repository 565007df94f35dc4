"""FlashAttention-3 for the prompts of a step, where the package that has it is installed.

The package (`tokenspeed-fa3`, which brings `flash_attn_3`) registers `torch.ops.flash_attn_3.fwd`. That op is called as
it is: the functions of its Python interface cannot write to a tensor of ours.

What it is asked for, and why (Shah et al. 2024, https://arxiv.org/abs/2407.08608, and its sources in `hopper/` of
https://github.com/Dao-AILab/flash-attention):

- Keys and values are pages of the pool with strides of their own; only the last dimension has to be contiguous. Pages
  that no tile of keys divides are loaded by predicated copies, which leave out keys behind a row's last position, whose
  scores are replaced, and put zeros for such values (`load_K`, `load_V` in `paged_kv.h`). Pages of whole tiles would be
  loaded whole, and a weight of 0 times what lies behind a row's end is NaN where that is NaN: hence the limit on block
  sizes. That the package has kept to it is for `tests/gpu` to show, in pools full of NaN.
- Row r has the tokens from `edges[r]` on, `queries[r]` of them, and sees `keys[r]` positions, the mask aligned to the
  last ones. Rows without queries have no tile. Rows with queries and without keys get zeros: so do the tokens behind
  the last row, which count as one more row.
- One split, so that the grid, the temporary memory and the bits follow from shapes: no number on the host depends on
  what the step holds, and the same call stands in a recording. The most queries of a row are given as all tokens.

Legend as in `ops`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

__all__ = ["INSTALL", "MIN_TOKENS", "FlashRows", "attend", "flash_attention", "missing", "unsupported"]

INSTALL: Final = "pip install 'ostinato[flash]'"

MIN_TOKENS: Final = 256
"""Steps of fewer tokens are left to our kernels: two launches through torch for each layer cost the host more than
what a better kernel saves in one or two tiles of queries."""

_CAPABILITY: Final = (9, 0)
_DTYPES: Final = (torch.bfloat16, torch.float16)
_MAX_HEAD_SIZE: Final = 256
_HEAD_SIZE_UNIT: Final = 8  # elements of 16 bytes, which is what it loads at a time
_MAX_BLOCK_SIZE: Final = 32
"""No tile of keys is as short; one that divides a page would have it loaded whole, see above."""
_MAX_ROWS: Final = 991
"""Rows that one block of its scheduler puts in order, less the one for padding."""


class FlashRows(NamedTuple):
    """The rows of a step as FlashAttention wants them (see `ops.plan_flash`): R of the key, and one for padding."""

    page_table: Tensor  # [R + 1, W] int32: blocks of each row, behind its last one anything
    edges: Tensor  # [R + 2] int32: each row's first token, and behind the last row the number of all tokens
    queries: Tensor  # [R + 1] int32: tokens of each row that are attended for
    keys: Tensor  # [R + 1] int32: positions of each row, 0 where it has no queries


def unsupported(
    head_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, *, block_size: int, max_rows: int, max_tokens: int
) -> str | None:
    """Why attention of these shapes and types cannot go this way; None where it can. `kv_dtype`: of the KV cache;
    `max_rows`, `max_tokens`: of a step."""
    if dtype not in _DTYPES:
        return f"it computes in bfloat16 and float16, not {_name(dtype)}"
    if kv_dtype is not dtype:
        return f"it reads a KV cache of the model's dtype, {_name(dtype)}, not {_name(kv_dtype)}"
    if head_size > _MAX_HEAD_SIZE or head_size % _HEAD_SIZE_UNIT:
        return f"head sizes are multiples of {_HEAD_SIZE_UNIT} up to {_MAX_HEAD_SIZE}, not {head_size}"
    if block_size > _MAX_BLOCK_SIZE:
        return f"blocks have at most {_MAX_BLOCK_SIZE} tokens, not {block_size}"
    if max_rows > _MAX_ROWS:
        return f"it runs up to {_MAX_ROWS} requests at once, not {max_rows}"
    if max_tokens < MIN_TOKENS:
        return f"it takes steps of {MIN_TOKENS} tokens or more, and max_num_batched_tokens is {max_tokens}"
    return None


def missing(device: torch.device) -> str | None:
    """Why there is no FlashAttention-3 on this device; None where there is. Imports the package where it may run."""
    if device.type != "cuda":
        return f"it needs a CUDA device of compute capability 9.0, and this is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability != _CAPABILITY:
        return f"it needs a device of compute capability 9.0, this one has {capability[0]}.{capability[1]}"
    return _import_error()


@functools.cache
def _import_error() -> str | None:
    try:
        importlib.import_module("flash_attn_3._C")  # registers the op; a library that is linked against torch
        _forward()
    except (ImportError, OSError, AttributeError) as error:
        return f"the package tokenspeed-fa3 cannot be imported ({error}): {INSTALL}"
    return None


@functools.cache
def _forward() -> Callable[..., Any]:
    forward: Callable[..., Any] = torch.ops.flash_attn_3.fwd.default
    return forward


def flash_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    edges: Tensor,
    queries: Tensor,
    keys: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """See `ops.flash_attention`. `missing` must have said that there is FlashAttention-3."""
    attend(_forward(), q, k_cache, v_cache, FlashRows(page_table, edges, queries, keys), scale, out)


def attend(
    forward: Callable[..., Any], q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: FlashRows, scale: float, out: Tensor
) -> None:
    """`forward`: the package's op, or what stands in for it. Arguments by the names of its schema, all others as they
    are there: some versions have more of them."""
    forward(
        q,
        k_cache,
        v_cache,
        out=out,
        cu_seqlens_q=rows.edges,
        seqused_q=rows.queries,
        seqused_k=rows.keys,
        max_seqlen_q=q.shape[0],
        page_table=rows.page_table,
        softmax_scale=scale,
        is_causal=True,
        num_splits=1,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
