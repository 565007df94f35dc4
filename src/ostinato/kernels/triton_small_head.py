"""The head's product of some rows with the choice of their tokens inside: `small_linear_sample` on CUDA.

The product is the one of `triton_small_gemm`, with the same bits. A program has a tile of the logits in registers: it
leaves each row's best value there (the logit, or for a row that draws without filters the tempered logit + noise) with
its token, and writes the logits only of rows that are asked for more, which the request state on the device says.
`triton_sampling` then picks among the tiles, or for those other rows goes over their logits.

What it saves is writing and reading logits: 4 bytes a row and token, beside 2 K bytes of weights a token. What it
costs, for rows that draw, is four times the calls of Philox: the four tokens that share one are in different tiles.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ostinato.kernels.ops_sampling import SamplingState
from ostinato.kernels.small_configs import SmallConfig, head_config
from ostinato.kernels.triton_launch import early
from ostinato.kernels.triton_logits import MIN_TEMPERATURE, NO_ID, has_filters, needs_logits, noise_of
from ostinato.kernels.triton_sampling import FP_FUSION, sample
from ostinato.kernels.triton_small_gemm import compile_time, multiply, prefetch

__all__ = ["head_kernel", "launch_head", "small_linear_sample"]


@triton.jit(do_not_specialize=["num_rows"])
def head_kernel(
    x,
    weight,
    logits,
    row_slot,
    temperature,
    top_p,
    min_p,
    top_k,
    seed_lo,
    seed_hi,
    num_tokens,
    flags,
    num_logprobs,
    tile_values,
    tile_ids,
    scratch,
    num_rows,
    num_vocab,
    size,
    x_stride,
    logits_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TURNED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (R / BLOCK_M * V / BLOCK_N,). `x [R, size]`, `weight [V, size]`; `tile_values` and `tile_ids` are
    [R, V / BLOCK_N]. Rows of the scratch slot write nothing. See `small_gemm_kernel` for the rest."""
    num_blocks_m = tl.cdiv(num_rows, BLOCK_M)
    tile = tl.program_id(0)
    block = tile // num_blocks_m
    first = block * BLOCK_N
    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            prefetch(weight, first, num_vocab, 0, size, BLOCK_N, PREFETCH, LANES)
        gdc_wait()

    rows = (tile % num_blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    ids = first + tl.arange(0, BLOCK_N)
    acc, _ = multiply(
        x, weight, weight, rows, ids, 0, num_rows, num_vocab, size, size, x_stride,
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, False, TURNED, EVEN_N, EVEN_K,
    )  # fmt: skip
    rounded = acc.to(logits.dtype.element_ty)
    inside = (ids < num_vocab)[None, :]

    # Places past the last row read the scratch row's state and write nothing, as its rows do.
    slot = tl.load(row_slot + rows, mask=rows < num_rows, other=scratch)
    live = slot != scratch
    wanted = (tl.load(num_logprobs + slot) >= 0) | needs_logits(
        flags, temperature, top_k, top_p, min_p, slot, num_vocab
    )
    at = logits + rows[:, None].to(tl.int64) * logits_stride + ids[None, :]
    tl.store(at, rounded, mask=(live & wanted)[:, None] & inside)

    value = rounded.to(tl.float32)
    value = tl.where(inside & (value == value), value, -float("inf"))
    degree = tl.load(temperature + slot)
    draws = live & (degree >= MIN_TEMPERATURE)
    # a divisor that is never 0, for rows that do not divide
    inverse = tl.div_rn(1.0, tl.where(draws, degree, 1.0))
    value = value * inverse[:, None]
    noisy = draws & (has_filters(top_k, top_p, min_p, slot, num_vocab) == 0)
    if tl.max(noisy.to(tl.int32), 0) > 0:
        lo, hi, known = tl.load(seed_lo + slot), tl.load(seed_hi + slot), tl.load(num_tokens + slot)
        all_ids = ids[None, :] + tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        value = tl.where(noisy[:, None], value + noise_of(all_ids, lo[:, None], hi[:, None], known[:, None]), value)
    best = tl.max(value, 1)
    token = tl.min(tl.where(value == best[:, None], ids[None, :], NO_ID), 1)
    target = rows.to(tl.int64) * tl.cdiv(num_vocab, BLOCK_N) + block
    tl.store(tile_values + target, best, mask=live)
    tl.store(tile_ids + target, token, mask=live)


def launch_head(
    config: SmallConfig,
    x: Tensor,
    weight: Tensor,
    row_slot: Tensor,
    state: SamplingState,
    num_logprobs: Tensor,
    logits: Tensor,
    adjusted: Tensor,
    sampled: Tensor,
) -> None:
    """`ops.small_linear_sample` with a given config."""
    (num_rows, size), num_vocab = x.shape, weight.shape[0]
    num_tiles = triton.cdiv(num_vocab, config.block_n)
    tile_values = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=x.device)
    tile_ids = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=x.device)
    aligned = weight.data_ptr() % 16 == 0 and size * weight.element_size() % 16 == 0
    if num_rows > 0:
        head_kernel[(triton.cdiv(num_rows, config.block_m) * num_tiles,)](
            x, weight, logits, row_slot, state.temperature, state.top_p, state.min_p, state.top_k, state.seed_lo,
            state.seed_hi, state.num_tokens, state.flags, num_logprobs, tile_values, tile_ids,
            state.temperature.shape[0] - 1, num_rows, num_vocab, size, x.stride(0), logits.stride(0),
            num_warps=config.num_warps, enable_fp_fusion=FP_FUSION,
            **compile_time(config, num_vocab, size, 1, aligned=aligned), **early(x.device),
        )  # fmt: skip
    sample(logits, row_slot, *state, adjusted, sampled, tile_values, tile_ids)


def small_linear_sample(x: Tensor, weight: Tensor, row_slot: Tensor, *rest: Tensor) -> None:
    """See `ops.small_linear_sample`; `rest` is the state and what comes behind it there."""
    (num_rows, size), num_vocab = x.shape, weight.shape[0]
    config = head_config(num_vocab, size, num_rows)
    if config is None:
        raise ValueError(
            f"no head kernel for {num_rows} rows of {size} inputs and {num_vocab} tokens; use the separate ops"
        )
    count = len(SamplingState._fields)
    launch_head(config, x, weight, row_slot, SamplingState(*rest[:count]), *rest[count:])
