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

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.decode_tiles import DecodeTiles, require_cells
from ostinato.kernels.op_library import Op, no_output, register
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

__all__ = [
    "DecodeTiles",
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
    "gather_blocks",
    "invariant_attention",
    "invariant_linear",
    "invariant_silu_mul",
    "kv_write",
    "logprobs",
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
    "wait_loaded",
]


class SamplingState(NamedTuple):
    """Sampling parameters of every state row, in the order in which the `sample` op takes them."""

    temperature: Tensor  # [S] float32; 0 is greedy
    top_p: Tensor  # [S] float32; 1 is off
    min_p: Tensor  # [S] float32; 0 is off
    repetition_penalty: Tensor  # [S] float32; 1 is off
    presence_penalty: Tensor  # [S] float32
    frequency_penalty: Tensor  # [S] float32
    top_k: Tensor  # [S]; 0 is off
    seed_lo: Tensor  # [S]; the key of the row's random stream
    seed_hi: Tensor  # [S]
    min_length: Tensor  # [S]; no stop id before num_tokens reaches it
    num_tokens: Tensor  # [S]; known tokens, the counter of the row's random stream
    stop_ids: Tensor  # [S, 64]; -1 pads
    bias_ids: Tensor  # [S, 300]; -1 pads
    bias_values: Tensor  # [S, 300] float32
    output_counts: Tensor  # [S, V]; how often the row has produced each token
    in_prompt: Tensor  # [S, V] bool
    allowed: Tensor  # [S, V / 32] words of 32 bits: the tokens that a row with the flag may draw
    flags: Tensor  # [S]; see FLAG_* in reference_sampling


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
        "kv_write",
        "reference_attention",
        "triton_kv_write",
        "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
        "Tensor? kv_scales=None) -> ()",
        no_output,
    ),
    Op(
        "attention",
        "reference_attention",
        "triton_attention",
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor row_slot, Tensor query_start, "
        "Tensor seq_lens, float scale, int query_len, int num_rows, int num_splits, Tensor(a!) out, "
        "Tensor? kv_scales=None, bool singles=True) -> ()",
        no_output,
    ),
    Op(
        "plan_tiles",
        "reference_tiles",
        "triton_decode_tiles",
        "(Tensor seq_lens, Tensor query_start, Tensor block_table, Tensor row_slot, int query_len, int num_rows, "
        "int block_size, int block_cells, int tile, Tensor(a!) starts, Tensor(b!) info, Tensor(c!) cells) -> ()",
        no_output,
    ),
    Op(
        "attend_tiles",
        "reference_tiles",
        "triton_decode_tiles",
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor starts, Tensor info, Tensor cells, Tensor query_start, "
        "float scale, int query_len, int num_rows, int tile, int num_programs, Tensor(a!) out, Tensor(b!) counters, "
        "Tensor(c!) partials, Tensor? kv_scales=None) -> ()",
        no_output,
    ),
    Op(
        "rope_write",
        "reference_tiles",
        "triton_rope_write",
        "(Tensor(a!) q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, "
        "float eps, Tensor slot_mapping, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor? kv_scales=None) -> ()",
        no_output,
    ),
    Op(
        "decode_attention",
        "reference_attention",
        "triton_decode_fused",
        "(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, float eps, "
        "Tensor slot_mapping, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor block_table, Tensor row_slot, "
        "Tensor seq_lens, float scale, int num_rows, int num_splits, Tensor(c!) out, Tensor(d!) counters, "
        "bool pdl=False, Tensor? kv_scales=None, Tensor(e!)? partials=None) -> ()",
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
    Op(
        "copy_blocks",
        "reference_blocks",
        "triton_blocks",
        "(Tensor source, Tensor(a!) target, Tensor source_ids, Tensor target_ids, int first_layer, int num_layers) "
        "-> ()",
        no_output,
    ),
    Op(
        "gather_blocks",
        "reference_blocks",
        "triton_gather",
        "(Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor row_slot, Tensor seq_lens, int num_rows, "
        "Tensor(a!) keys, Tensor(b!) values) -> ()",
        no_output,
    ),
    Op("wait_loaded", "reference_blocks", None, "(Tensor(a!) pending, int layer) -> ()", no_output),
    Op(
        "invariant_attention",
        "reference_invariant",
        "triton_invariant",
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor row_slot, Tensor query_start, "
        "Tensor seq_lens, float scale, int num_rows, Tensor(a!) out, Tensor? kv_scales=None) -> ()",
        no_output,
    ),
    Op("embed", "reference", "triton_step", "(Tensor token_ids, Tensor weight, Tensor(a!) out) -> ()", no_output),
    Op("scatter", "reference", "triton_step", "(Tensor(a!) arena, Tensor patches, int count) -> ()", no_output),
    Op(
        "sample",
        "reference_sampling",
        "triton_sampling",
        "(Tensor logits, Tensor row_slot, "
        + ", ".join(f"Tensor {name}" for name in SamplingState._fields)
        + ", Tensor(a!) adjusted, Tensor(b!) sampled) -> ()",
        no_output,
    ),
    Op(
        "logprobs",
        "reference_sampling",
        "triton_logprobs",
        "(Tensor logits, Tensor row_slot, Tensor num_logprobs, Tensor sampled, Tensor(a!) out_values, "
        "Tensor(b!) out_ids) -> ()",
        no_output,
    ),
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
_kv_write: Final = torch.ops.ostinato.kv_write.default
_attention: Final = torch.ops.ostinato.attention.default
_plan_tiles: Final = torch.ops.ostinato.plan_tiles.default
_attend_tiles: Final = torch.ops.ostinato.attend_tiles.default
_rope_write: Final = torch.ops.ostinato.rope_write.default
_decode_attention: Final = torch.ops.ostinato.decode_attention.default
_rms_norm: Final = torch.ops.ostinato.rms_norm.default
_add_rms_norm: Final = torch.ops.ostinato.add_rms_norm.default
_rope: Final = torch.ops.ostinato.rope.default
_silu_mul: Final = torch.ops.ostinato.silu_mul.default
_invariant_silu_mul: Final = torch.ops.ostinato.invariant_silu_mul.default
_invariant_attention: Final = torch.ops.ostinato.invariant_attention.default
_embed: Final = torch.ops.ostinato.embed.default
_scatter: Final = torch.ops.ostinato.scatter.default
_sample: Final = torch.ops.ostinato.sample.default
_logprobs: Final = torch.ops.ostinato.logprobs.default
_advance: Final = torch.ops.ostinato.advance.default
_copy_blocks: Final = torch.ops.ostinato.copy_blocks.default
_gather_blocks: Final = torch.ops.ostinato.gather_blocks.default
_wait_loaded: Final = torch.ops.ostinato.wait_loaded.default


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


def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None = None
) -> None:
    """Writes a step's keys and values into the paged cache.

    `k [T, G, D]`, `v [T, G, D]`, `k_cache! [N, B, G, D]`, `v_cache! [N, B, G, D]` (strided views), `slot_mapping
    [>=T]`: token t goes to block `slot // B`, place `slot % B`; a negative slot writes nothing.
    `kv_scales [2, G]` float32, of keys and values: x is stored as x / scale (see `kv_formats`); None: as it is.
    """
    _kv_write(k, v, k_cache, v_cache, slot_mapping, kv_scales)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    query_len: int,
    num_rows: int,
    num_splits: int,
    out: Tensor,
    kv_scales: Tensor | None = None,
    singles: bool = True,
) -> None:
    """Causal attention of a step's queries over the paged cache, which already holds the step's own keys.

    `q [T, H, D]`, `k_cache [N, B, G, D]`, `v_cache [N, B, G, D]`, `block_table [S, W]`, `row_slot [>=num_rows]`,
    `query_start [>=num_rows + 1]`, `seq_lens [>=num_rows]`, `out! [T, H, D]`. Token j of a row with q tokens sees the
    positions below `seq_len - q + j + 1`; padding gives zeros. Nothing outside a row's live positions is used, NaN
    included. `query_len` 0: as `query_start` says, which on CUDA is read for long queries of one length too.
    `num_splits` (short queries of one length, CUDA only) is how many programs share one row's keys. `kv_scales`: as
    they were written with (see `kv_write`). `singles` false (a ragged step): rows of one token are left to
    `attend_tiles`, to be called next.
    """
    _attention(
        q,
        k_cache,
        v_cache,
        block_table,
        row_slot,
        query_start,
        seq_lens,
        scale,
        query_len,
        num_rows,
        num_splits,
        out,
        kv_scales,
        singles,
    )


def plan_tiles(
    seq_lens: Tensor,
    query_start: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    query_len: int,
    num_rows: int,
    block_size: int,
    tiles: DecodeTiles,
) -> None:
    """Lists the tiles of the rows of one token, each row's behind the ones of the row before.

    `seq_lens [>=num_rows]`, `query_start [>=num_rows + 1]`, `block_table [S, W]`, `row_slot [>=num_rows]`; of `tiles!`
    `starts [>=num_rows + 1]`, `info [N, 2]`, `cells [N, U]`, with room for all tiles of all rows at full length. With
    `query_len` 0 rows of other than one token have no tile; with 1 each row has at least one, even without positions.
    What lies behind the last tile stays.
    """
    _plan_tiles(
        seq_lens,
        query_start,
        block_table,
        row_slot,
        query_len,
        num_rows,
        block_size,
        tiles.block_cells,
        tiles.tile,
        tiles.starts,
        tiles.info,
        tiles.cells,
    )


def attend_tiles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: DecodeTiles,
    query_start: Tensor,
    scale: float,
    query_len: int,
    num_rows: int,
    out: Tensor,
    counters: Tensor,
    partials: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """`attention` of the rows that `plan_tiles` listed; tokens of no such row stay as they are. Raises ValueError for a
    list that is for a cache of other strides.

    `q [T, H, D]`, `k_cache [N, B, G, D]` and `v_cache [N, B, G, D]` of the same strides, `query_start
    [>=num_rows + 1]`, `query_len` and `num_rows` as for `plan_tiles`, `out! [T, H, D]`, `counters! [>=num_rows * G]`
    int32, zero before the first call and after each, `partials!` float32 `[>=2 * num_programs * H * (D + 1)]`:
    workspace. Calls of one stream may share both.
    """
    require_cells(tiles, k_cache)
    _attend_tiles(
        q,
        k_cache,
        v_cache,
        tiles.starts,
        tiles.info,
        tiles.cells,
        query_start,
        scale,
        query_len,
        num_rows,
        tiles.tile,
        tiles.num_programs,
        out,
        counters,
        partials,
        kv_scales,
    )


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
    """`rope` and `kv_write` in one: `q! [T, H, D]` is turned in place, `k [T, G, D]` stays and goes to the cache
    turned, `v [T, G, D]` as it is. The rest as there."""
    _rope_write(q, k, v, positions, cos_sin, q_norm, k_norm, eps, slot_mapping, k_cache, v_cache, kv_scales)


def decode_attention(
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
    block_table: Tensor,
    row_slot: Tensor,
    seq_lens: Tensor,
    scale: float,
    num_rows: int,
    num_splits: int,
    out: Tensor,
    counters: Tensor,
    pdl: bool = False,
    kv_scales: Tensor | None = None,
    partials: Tensor | None = None,
) -> None:
    """`rope`, `kv_write` and `attention` of a step with one token a row in one: takes raw q, k, v and keeps them.

    `q [R, H, D]`, `k [R, G, D]`, `v [R, G, D]`, `k_cache! [N, B, G, D]`, `v_cache! [N, B, G, D]`, `out! [R, H, D]`,
    `counters! [>=num_rows * G]` int32; the rest as there. A row's token is its last position; its slot, if it has one,
    is the cell which the table gives for that, as `prepare` leaves it, and is not read back from the cache. `counters`
    must be zero before the first call, is zero again after each, and may be shared by calls of one stream.

    `partials!` float32 `[>=num_rows * num_splits * H * (D + 1)]`: workspace, which calls of one stream may share;
    without it the op makes its own (CUDA only).

    `pdl` launches programmatically where the device can (compute capability 9.0 on). Whatever wrote the integers, the
    tables and the cache's older cells must then have been complete when some kernel in between was started.
    """
    _decode_attention(
        q,
        k,
        v,
        positions,
        cos_sin,
        q_norm,
        k_norm,
        eps,
        slot_mapping,
        k_cache,
        v_cache,
        block_table,
        row_slot,
        seq_lens,
        scale,
        num_rows,
        num_splits,
        out,
        counters,
        pdl,
        kv_scales,
        partials,
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
    """`attention` with `query_len` 0, where a token's output has the same bits however its prompt was cut into steps
    and whatever stands beside it: they follow from its query and from the keys and values up to its own position.
    """
    _invariant_attention(
        q, k_cache, v_cache, block_table, row_slot, query_start, seq_lens, scale, num_rows, out, kv_scales
    )


def embed(token_ids: Tensor, weight: Tensor, out: Tensor) -> None:
    """`out! [T, C]` are the rows `token_ids [T]` of `weight [V, C]`, contiguous."""
    _embed(token_ids, weight, out)


def scatter(arena: Tensor, patches: Tensor, count: int) -> None:
    """Writes the host's changes: `arena![patches[i, 0]] = patches[i, 1]` for i < count.

    `arena! [A]` int32, `patches [>=count, 2]` int32. No offset may occur twice.
    """
    _scatter(arena, patches, count)


def sample(logits: Tensor, row_slot: Tensor, state: SamplingState, adjusted: Tensor, sampled: Tensor) -> None:
    """Chooses one token per row; the algorithm is spelled out in `reference_sampling`.

    `logits [R, V]`, `row_slot [>=R]`, `adjusted! [>=R, V]` float32 (a workspace: logits after bias and penalties, of
    the rows whose flags ask for them), `sampled! [Rmax]`: -1 for scratch rows and rows from R on. A row's draw
    depends on its seed, its number of known tokens and its logits alone. Logits without any finite value give 0.
    """
    _sample(logits, row_slot, *state, adjusted, sampled)


def logprobs(
    logits: Tensor, row_slot: Tensor, num_logprobs: Tensor, sampled: Tensor, out_values: Tensor, out_ids: Tensor
) -> None:
    """Log-probabilities under the raw logits of the sampled token and the likeliest ones, for rows that want them.

    `logits [R, V]`, `row_slot [>=R]`, `num_logprobs [S]` (-1: none; at most 20), `sampled [>=R]`, `out_values! [Rmax,
    22]` float32, `out_ids! [Rmax, 22]`. Column 0 is the sampled token; column 1 of the ids its rank (from 1: one more
    than the number of larger logits), of the values the log of the sum of exponentials; from column 2 on come the
    likeliest tokens, lower id first among equals, then -1 and -inf. Other rows are not touched.
    """
    _logprobs(logits, row_slot, num_logprobs, sampled, out_values, out_ids)


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


def copy_blocks(
    source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor, first_layer: int, num_layers: int
) -> None:
    """Copies layers `first_layer` to `first_layer + num_layers` of whole KV blocks, as bytes.

    `source [N1, L, E]` uint8, `target! [N2, L, E]` uint8, `source_ids [n]`, `target_ids [n]`: block `source_ids[i]`
    goes to block `target_ids[i]`. Either tensor may lie in pinned host memory, the ids are where the other one is. E is
    a multiple of 8. Ids must be valid, and those of the target differ.
    """
    _copy_blocks(source, target, source_ids, target_ids, first_layer, num_layers)


def gather_blocks(
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    row_slot: Tensor,
    seq_lens: Tensor,
    num_rows: int,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Copies each row's blocks to a place of the row's own, in order and as stored.

    `k_cache [N, B, G, D]`, `v_cache [N, B, G, D]`, `keys! [R * W, B, G, D]`, `values! [R * W, B, G, D]`, each block of
    which is contiguous; `block_table [S, W]`, `row_slot [>=num_rows]`, `seq_lens [>=num_rows]`. Block w of row r, if it
    holds one of the row's first `seq_lens[r]` positions, goes to block `r * W + w`, whole. Nothing else is read, table
    entries included, or written: a row of length 0 costs a look at its length.
    """
    _gather_blocks(k_cache, v_cache, block_table, row_slot, seq_lens, num_rows, keys, values)


def wait_loaded(pending: Tensor, layer: int) -> None:
    """CPU only: returns when `pending[layer]`, which another thread writes, is 0. On CUDA an event does this.

    `pending [L]`. Raises OstinatoError where it becomes negative: what was waited for will not come.
    """
    _wait_loaded(pending, layer)
