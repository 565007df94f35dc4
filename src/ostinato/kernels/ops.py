"""The ops of a step: their schemas, where each is implemented, and one thin typed wrapper each.

Legend: T tokens of the step, R rows of the step (Tmax, Rmax: capacity of the step's buffers), S state rows (row S-1 is
the scratch row of all padding), M most tokens per row, W block table width, B block size, N blocks, H query heads,
G key/value heads, D head size, C hidden size, I intermediate size, V vocabulary. Integers are int32, and float tensors
float32, bfloat16 or float16. A tensor marked `!` is written in place. Input tensors may be strided views as long as
the last dimension is contiguous.

`query_len` says how a step's tokens are split among its rows: above 0, every row has that many; 0, row r has those
from `query_start[r]` to `query_start[r + 1]`.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from ostinato.kernels.decode_tiles import DecodeTiles
from ostinato.kernels.flash_attention import FlashRows
from ostinato.kernels.op_library import Op, no_output, register
from ostinato.kernels.ops_attention import (
    attend_tiles,
    attention,
    decode_attention,
    flash_attention,
    invariant_attention,
    kv_write,
    plan_flash,
    plan_tiles,
    rope_write,
)
from ostinato.kernels.ops_blocks import copy_blocks, gather_blocks, wait_loaded
from ostinato.kernels.ops_projections import (
    add_parts,
    add_parts_rms_norm,
    few_gate_up_silu,
    few_linear_residual,
    few_norm_linear,
    invariant_linear,
    small_gate_up_silu,
    small_linear,
    small_linear_parts,
)
from ostinato.kernels.ops_sampling import SamplingState, logprobs, sample, small_linear_sample

__all__ = [
    "DecodeTiles",
    "FlashRows",
    "SamplingState",
    "add_parts",
    "add_parts_rms_norm",
    "add_rms_norm",
    "advance",
    "attend_tiles",
    "attention",
    "copy_blocks",
    "decode_attention",
    "embed",
    "few_gate_up_silu",
    "few_linear_residual",
    "few_norm_linear",
    "flash_attention",
    "gather_blocks",
    "invariant_attention",
    "invariant_linear",
    "invariant_silu_mul",
    "kv_write",
    "logprobs",
    "plan_flash",
    "plan_tiles",
    "prepare",
    "rms_norm",
    "rope",
    "rope_write",
    "sample",
    "scatter",
    "silu_mul",
    "small_gate_up_silu",
    "small_linear",
    "small_linear_parts",
    "small_linear_sample",
    "wait_loaded",
]


def _like_input(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _half_as_wide(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


_OPS: Final = (
    Op(
        "prepare",
        "reference",
        "triton_step",
        "(Tensor row_slot, Tensor query_start, Tensor num_computed, Tensor num_tokens, Tensor tokens, "
        "Tensor block_table, int query_len, int num_rows, int block_size, Tensor(a!) token_ids, "
        "Tensor(b!) positions, Tensor(c!) slot_mapping, Tensor(d!) seq_lens, Tensor(e!) logit_index) -> ()",
        no_output,
    ),
    Op(
        "rms_norm",
        "reference",
        "triton_elementwise",
        "(Tensor x, Tensor weight, float eps) -> Tensor",
        _like_input,
    ),
    Op(
        "add_rms_norm",
        "reference",
        "triton_elementwise",
        "(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor",
        _like_input,
    ),
    Op(
        "rope",
        "reference",
        "triton_elementwise",
        "(Tensor(a!) q, Tensor(b!) k, Tensor positions, Tensor cos_sin, Tensor? q_weight, Tensor? k_weight, "
        "float eps) -> ()",
        no_output,
    ),
    Op("silu_mul", "reference", "triton_elementwise", "(Tensor gate_up) -> Tensor", _half_as_wide),
    Op("invariant_silu_mul", "reference_invariant", "triton_invariant", "(Tensor gate_up) -> Tensor", _half_as_wide),
    Op("embed", "reference", "triton_step", "(Tensor token_ids, Tensor weight, Tensor(a!) out) -> ()", no_output),
    Op("scatter", "reference", "triton_step", "(Tensor(a!) arena, Tensor patches, int count) -> ()", no_output),
    Op(
        "advance",
        "reference",
        "triton_step",
        "(Tensor row_slot, Tensor query_start, Tensor sampled, int query_len, int num_rows, Tensor(a!) tokens, "
        "Tensor(b!) num_tokens, Tensor(c!) num_computed, Tensor(d!) output_counts, Tensor(e!) step_count, "
        "Tensor(f!) ring) -> ()",
        no_output,
    ),
)


register(_OPS)

_prepare: Final = torch.ops.ostinato.prepare.default
_rms_norm: Final = torch.ops.ostinato.rms_norm.default
_add_rms_norm: Final = torch.ops.ostinato.add_rms_norm.default
_rope: Final = torch.ops.ostinato.rope.default
_silu_mul: Final = torch.ops.ostinato.silu_mul.default
_invariant_silu_mul: Final = torch.ops.ostinato.invariant_silu_mul.default
_embed: Final = torch.ops.ostinato.embed.default
_scatter: Final = torch.ops.ostinato.scatter.default
_advance: Final = torch.ops.ostinato.advance.default


def prepare(
    row_slot: Tensor,
    query_start: Tensor,
    num_computed: Tensor,
    num_tokens: Tensor,
    tokens: Tensor,
    block_table: Tensor,
    query_len: int,
    num_rows: int,
    block_size: int,
    token_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    logit_index: Tensor,
) -> None:
    """Derives a step's inputs from the request state: the only writer of the last five arguments.

    `row_slot [>=num_rows]`, `query_start [>=num_rows + 1]`, `num_computed [S]`, `num_tokens [S]`, `tokens [S, M]`,
    `block_table [S, W]`; `token_ids! [Tmax]`, `positions! [Tmax]`, `slot_mapping! [Tmax]`, `seq_lens! [Rmax]`,
    `logit_index! [Rmax]`, every entry of which is written. Token j of row r, in state row s, has position
    `num_computed[s] + j`, that token of `tokens[s]`, and the cache slot which the table gives for the position;
    `seq_lens[r]` is the length including the step's own tokens, `logit_index[r]` the step index of the row's last
    token. Everything else is padding: id 0, position 0, slot -1 (no write), length 0, index 0. So are tokens whose
    position has no place in `tokens` or `block_table`, and lengths stop there. `num_tokens` is not read yet.
    """
    _prepare(
        row_slot,
        query_start,
        num_computed,
        num_tokens,
        tokens,
        block_table,
        query_len,
        num_rows,
        block_size,
        token_ids,
        positions,
        slot_mapping,
        seq_lens,
        logit_index,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019) of `x [T, C]` with `weight [C]`: a new `[T, C]`.

    Rounded where Llama's reference implementation rounds: `weight * (x * rsqrt(mean(x^2) + eps)).to(dtype)`, the inner
    part in float32.
    """
    out: Tensor = _rms_norm(x, weight, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds `x [T, C]` to `residual! [T, C]` (rounded to their dtype) and returns `rms_norm(residual, weight, eps)`."""
    out: Tensor = _add_rms_norm(x, residual, weight, eps)
    return out


def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotary position embedding (Su et al. 2021) of queries and keys in place, optionally normalised first.

    `q! [T, H, D]`, `k! [T, G, D]`, `positions [>=T]`, `cos_sin [P, rot]` float32, a row of which is `rot / 2` cosines
    and then as many sines. Dimension i is paired with `i + rot / 2` (the halves of GPT-NeoX); those from `rot` on are
    left alone. `q_weight [D]` and `k_weight [D]`, both or neither, ask for an RMSNorm over D before the rotation, as
    in Qwen3. The rotation is computed in float32 and rounded once.
    """
    _rope(q, k, positions, cos_sin, q_weight, k_weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's product (Shazeer 2020): `silu(gate) * up` of `gate_up [T, 2 I]`, a new `[T, I]`; silu is rounded."""
    out: Tensor = _silu_mul(gate_up)
    return out


def invariant_silu_mul(gate_up: Tensor) -> Tensor:
    """`silu_mul`, and the bits of a row of `gate_up [T, 2 I]` depend on that row alone."""
    out: Tensor = _invariant_silu_mul(gate_up)
    return out


def embed(token_ids: Tensor, weight: Tensor, out: Tensor) -> None:
    """`out! [T, C]` are the rows `token_ids [T]` of `weight [V, C]`, contiguous."""
    _embed(token_ids, weight, out)


def scatter(arena: Tensor, patches: Tensor, count: int) -> None:
    """Writes the host's changes: `arena![patches[i, 0]] = patches[i, 1]` for i < count.

    `arena! [A]` int32, `patches [>=count, 2]` int32. No offset may occur twice.
    """
    _scatter(arena, patches, count)


def advance(
    row_slot: Tensor,
    query_start: Tensor,
    sampled: Tensor,
    query_len: int,
    num_rows: int,
    tokens: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
    output_counts: Tensor,
    step_count: Tensor,
    ring: Tensor,
) -> None:
    """Moves the request state past the step and publishes what it sampled.

    `row_slot [>=num_rows]`, `query_start [>=num_rows + 1]`, `sampled [Rmax]`, `tokens! [S, M]`, `num_tokens! [S]`,
    `num_computed! [S]`, `output_counts! [S, V]`, `step_count! [1]`, `ring! [K, Rmax]` (on CUDA it may be pinned host
    memory). Each live row has computed its tokens; if none that is known is left and M allows one more, the sampled
    token is appended, counted, and written to `ring[step_count % K, r]`. Every other entry of that ring row is -1.
    """
    _advance(
        row_slot,
        query_start,
        sampled,
        query_len,
        num_rows,
        tokens,
        num_tokens,
        num_computed,
        output_counts,
        step_count,
        ring,
    )
