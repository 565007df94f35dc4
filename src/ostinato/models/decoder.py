"""The forward pass of a decoder, written once for Llama, Mistral, Qwen2 and Qwen3.

It works at fixed addresses: token ids and positions come from the step buffers; the residual stream, q, k, v and the
attention output live in workspaces that every layer and every recording share, so that an eager attention between two
graphs exchanges nothing but those. `cut("attention", op)` marks the place where a recording may be cut; with a
workspace for gathered keys and values the place is `cut("kv_gather", op)`, and attention stays in the graph behind it.

Shapes: T tokens of the step, R rows, H query heads, G key/value heads, D head size, N blocks, B block size, W blocks
of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ostinato.kernels import ops
from ostinato.kernels.few_configs import max_few_rows
from ostinato.kernels.small_configs import MAX_SMALL_ROWS, SMALL_ROWS, head_config
from ostinato.kv.storage import LayerCache
from ostinato.models.config import ModelConfig
from ostinato.models.projections import (
    CompiledProjections,
    FewRowProjections,
    InvariantProjections,
    PlainProjections,
    Projections,
    SmallProjections,
)
from ostinato.models.ranges import LayerRanges
from ostinato.models.rope import cos_sin_table
from ostinato.models.weights import DecoderWeights, LayerWeights

Cut = Callable[[str, Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class AttentionArgs:
    """What attention reads beside q, k and v: fixed addresses, and numbers that belong to the batch key."""

    block_table: torch.Tensor  # [S, W] int32
    row_slot: torch.Tensor  # [Rmax] int32
    query_start: torch.Tensor  # [Rmax + 1] int32
    seq_lens: torch.Tensor  # [Rmax] int32
    slot_mapping: torch.Tensor  # [Tmax] int32
    counters: torch.Tensor  # [Rmax * G] int32, zero between steps
    tiles: ops.DecodeTiles | None  # of the rows of one token, where these may fill the device
    partials: torch.Tensor  # float32: workspace for parts of rows, as `ops.attend_tiles` and `decode_attention` ask for
    num_rows: int
    query_len: int  # of every row; 0: ragged
    num_splits: int
    flash: ops.FlashRows | None  # the rows of a ragged step that FlashAttention is to attend for
    live_rows: Callable[[], int]  # of the step at hand: the first ones, at most num_rows; read on the host


@dataclass(frozen=True, slots=True)
class GatheredKV:
    """A row's keys and values one behind the other: a pool of W blocks for each of Rmax rows, and tables that say so,
    so that what attends over the cache attends over it as well. All layers share it."""

    pool: torch.Tensor  # [Rmax * W, 2, B, G, D], of the cache's format
    block_table: torch.Tensor  # [Rmax, W] int32: r * W + w, for good
    row_slot: torch.Tensor  # [Rmax] int32: r, for good

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.block_table, self.row_slot

    @property
    def keys(self) -> torch.Tensor:
        return self.pool[:, 0]

    @property
    def values(self) -> torch.Tensor:
        return self.pool[:, 1]


@dataclass(frozen=True, slots=True)
class Workspace:
    """Fixed buffers that all layers share."""

    stream: torch.Tensor  # [Tmax, hidden]: the residual stream; after the last layer, what the final norm takes
    qkv: torch.Tensor  # [Tmax, (H + 2G) * D]
    attention_out: torch.Tensor  # [Tmax, H * D]
    gathered: GatheredKV | None = None  # where a step copies each layer's keys and values before it attends


class Decoder:
    """Parameters and the forward pass. Holds no request state and no cache.

    `batch_invariant`: a token's bits depend on its request alone. Excludes `compile_layers`. `ranges` names what is
    launched by layer, where that is asked for.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        max_model_len: int,
        compile_layers: bool = False,
        batch_invariant: bool = False,
        ranges: LayerRanges | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.ranges = ranges
        device = weights.embed.device
        self.cos_sin = cos_sin_table(config.rope, config.rotary_dim, max_model_len, device)
        self.scale = config.head_dim**-0.5
        self.batch_invariant = batch_invariant
        self._plain: Projections = CompiledProjections() if compile_layers else PlainProjections()
        if batch_invariant:
            self._plain = InvariantProjections()
        self._few: Projections = FewRowProjections()
        self._small: Projections = SmallProjections()
        half = weights.embed.dtype in (torch.float16, torch.bfloat16)
        streams = device.type == "cuda" and half and not compile_layers and not batch_invariant
        self._max_few_rows = max_few_rows(config.hidden_size) if streams else 0
        self._max_small_rows = MAX_SMALL_ROWS if streams else 0

    def forward(
        self,
        token_ids: torch.Tensor,  # [T] int32
        positions: torch.Tensor,  # [T] int32
        caches: list[LayerCache],
        args: AttentionArgs,
        work: Workspace,
        cut: Cut,
        num_layers: int | None = None,
    ) -> None:
        """Leaves the residual stream of all T tokens, final norm not applied, in `work.stream[:T]`. `num_layers`: only
        the first ones; two of them (the first adds nothing to the stream it finds) launch every kernel that all do."""
        layers = zip(self.weights.layers[:num_layers], caches[:num_layers], strict=True)
        if self.ranges is None:
            self._forward(layers, token_ids, positions, args, work, cut)
            return
        with self.ranges.layers(layers) as named:
            self._forward(named, token_ids, positions, args, work, cut)

    def _forward(
        self,
        layers: Iterable[tuple[LayerWeights, LayerCache]],
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        args: AttentionArgs,
        work: Workspace,
        cut: Cut,
    ) -> None:
        num_tokens, eps = token_ids.shape[0], self.config.rms_norm_eps
        project = self._projections(num_tokens)
        stream, qkv, attention_out = (tensor[:num_tokens] for tensor in (work.stream, work.qkv, work.attention_out))
        query, key, value = self.split(qkv)
        out = attention_out.view(num_tokens, self.config.num_heads, self.config.head_dim)

        ops.embed(token_ids, self.weights.embed, stream)
        delta: torch.Tensor | None = None
        for layer, cache in layers:
            project.qkv(layer, delta, stream, eps, qkv)
            attend = _Attention(self, layer, positions, query, key, value, cache, args, out, work.gathered)
            if not attend.fused:
                attend.rotate()
            if work.gathered is None:
                cut("attention", attend)
            else:
                cut("kv_gather", partial(attend.gather, work.gathered))
                attend.over_gathered(work.gathered)
            delta = project.mlp(layer, attention_out, stream, eps)
        project.finish(delta, stream)

    def logits(self, stream: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """[R, hidden] of the residual stream -> [R, V], written to `out`."""
        self._projections(stream.shape[0]).head(self.weights, stream, self.config.rms_norm_eps, out)
        return out

    def samples_in_head(self, num_rows: int) -> bool:
        """Whether `sample` takes the place of `logits` and `ops.sample` for that many rows, by the head's shape."""
        num_vocab, size = self.weights.head.shape
        return num_rows <= self._max_small_rows and head_config(num_vocab, size, num_rows) is not None

    def sample(
        self,
        stream: torch.Tensor,
        row_slot: torch.Tensor,
        sampling: ops.SamplingState,
        num_logprobs: torch.Tensor,
        logits: torch.Tensor,
        adjusted: torch.Tensor,
        sampled: torch.Tensor,
    ) -> None:
        """[R, hidden] of the residual stream -> one token a row, and the logits [R, V] of the rows alone that need
        them. See `ops.small_linear_sample`."""
        normed = ops.rms_norm(stream, self.weights.norm, self.config.rms_norm_eps)
        ops.small_linear_sample(normed, self.weights.head, row_slot, sampling, num_logprobs, logits, adjusted, sampled)

    def _projections(self, num_rows: int) -> Projections:
        if num_rows <= self._max_few_rows:
            return self._few
        return self._small if num_rows <= self._max_small_rows else self._plain

    @property
    def kernel_sizes(self) -> tuple[int, ...]:
        """Numbers of rows, ascending, which between them need every kernel of the products. None on the CPU."""
        return (*range(1, self._max_few_rows + 1), *(n for n in SMALL_ROWS if n <= self._max_small_rows))

    @property
    def compiles(self) -> bool:
        """Whether the functions of a layer go through `torch.compile`."""
        return isinstance(self._plain, CompiledProjections)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of [T, (H + 2G) * D]: queries [T, H, D], keys and values [T, G, D]."""
        c = self.config
        query, key, value = qkv.split((c.query_size, c.kv_size, c.kv_size), dim=-1)
        return (
            query.view(-1, c.num_heads, c.head_dim),
            key.view(-1, c.num_kv_heads, c.head_dim),
            value.view(-1, c.num_kv_heads, c.head_dim),
        )


@dataclass(frozen=True, slots=True)
class _Attention:
    """Write this step's K and V, then attend. Called inside a graph, or between two as an eager segment: it holds views
    of fixed buffers only, so that a recording which keeps it keeps no memory of the graph pool alive.

    A step with one token a row does everything, rope included, here, in one op or two. Any other rotates first, inside
    the graph; so does every step that is to be batch-invariant, since decode and prompt must then run the same kernels.
    Where keys and values are gathered, writing them is part of that, so that all touching of the cache is outside the
    graph.
    """

    model: Decoder
    layer: LayerWeights
    positions: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: LayerCache
    args: AttentionArgs
    out: torch.Tensor
    gathered: GatheredKV | None

    @property
    def fused(self) -> bool:
        return self.args.query_len == 1 and not self.model.batch_invariant and self.gathered is None

    def rotate(self) -> None:
        model, layer = self.model, self.layer
        eps = model.config.rms_norm_eps
        ops.rope(self.query, self.key, self.positions, model.cos_sin, layer.q_norm, layer.k_norm, eps)

    def __call__(self) -> None:
        k_cache, v_cache, _ = self.cache
        if self.fused:
            if (tiles := self.args.tiles) is None:
                ops.decode_attention(*self._fused_args())
            else:
                ops.rope_write(*self._turned_and_written())
                ops.attend_tiles(self.query, k_cache, v_cache, *self._tiles_args(tiles))
            return
        self._write()
        self._attend(k_cache, v_cache, self.args.block_table, self.args.row_slot)

    def _fused_args(self) -> tuple[Any, ...]:
        """Of `ops.decode_attention`, in its order."""
        model, layer, a = self.model, self.layer, self.args
        k_cache, v_cache, scales = self.cache
        return (
            self.query,
            self.key,
            self.value,
            self.positions,
            model.cos_sin,
            layer.q_norm,
            layer.k_norm,
            model.config.rms_norm_eps,
            a.slot_mapping,
            k_cache,
            v_cache,
            a.block_table,
            a.row_slot,
            a.seq_lens,
            model.scale,
            a.num_rows,
            a.num_splits,
            self.out,
            a.counters,
            True,
            scales,
            a.partials,
        )

    def _tiles_args(self, tiles: ops.DecodeTiles) -> tuple[Any, ...]:
        """Of `ops.attend_tiles`, in its order, from `tiles` on."""
        a, scales = self.args, self.cache.scales
        rest = (self.model.scale, a.query_len, a.num_rows, self.out, a.counters, a.partials, scales)
        return (tiles, a.query_start, *rest)

    def _turned_and_written(self) -> tuple[Any, ...]:
        """Of `ops.rope_write`, in its order."""
        model, layer = self.model, self.layer
        k_cache, v_cache, scales = self.cache
        norms = (layer.q_norm, layer.k_norm, model.config.rms_norm_eps)
        heads = (self.query, self.key, self.value, self.positions, model.cos_sin, *norms)
        return (*heads, self.args.slot_mapping, k_cache, v_cache, scales)

    def prepare(self) -> Callable[[], None]:
        """The same as calling this, with as little left to the host as can be, for what runs between two graphs. What
        there is to prepare waits for the first call: of the keys that are recorded some are never used."""
        if not self.query.is_cuda or self.model.batch_invariant or self.gathered is not None or self.args.query_len > 1:
            return self
        run: Callable[[], None] | None = None

        def call() -> None:
            nonlocal run
            run = run or self._prepared()
            run()

        return call

    def _prepared(self) -> Callable[[], None]:
        from ostinato.kernels.triton_attention import prepared_around, prepared_decode, prepared_ragged
        from ostinato.kernels.triton_attention_prefill import prefill_call
        from ostinato.kernels.triton_decode_fused import decode_call
        from ostinato.kernels.triton_decode_tiles import attend_tiles_call
        from ostinato.kernels.triton_kv_write import kv_write_call
        from ostinato.kernels.triton_rope_write import rope_write_call

        a, device, (k_cache, v_cache, scales) = self.args, self.query.device, self.cache
        if a.tiles is None:
            assert self.fused
            return prepared_decode(decode_call(*self._fused_args()), device=device)
        singles = attend_tiles_call(self.query, k_cache, v_cache, *self._tiles_args(a.tiles))
        if self.fused:
            return prepared_decode(rope_write_call(*self._turned_and_written()), singles, device=device)
        write = kv_write_call(self.key, self.value, k_cache, v_cache, a.slot_mapping, scales)
        if (flash := a.flash) is not None:
            attend = partial(ops.flash_attention, self.query, k_cache, v_cache, flash, self.model.scale, self.out)
            return prepared_around(write, attend, singles, device)
        rows = (a.block_table, a.row_slot, a.query_start, a.seq_lens)
        over = (self.query, k_cache, v_cache, *rows, self.model.scale, a.num_rows, self.out)
        return prepared_ragged(
            write,
            prefill_call(*over, scales, singles=False),
            singles,
            device,
            a.live_rows,
        )

    def gather(self, into: GatheredKV) -> None:
        """Writes the step's keys and values, then copies those of every row of the key, as stored."""
        a, (k_cache, v_cache, _) = self.args, self.cache
        self._write()
        ops.gather_blocks(k_cache, v_cache, a.block_table, a.row_slot, a.seq_lens, a.num_rows, into.keys, into.values)

    def over_gathered(self, gathered: GatheredKV) -> None:
        self._attend(gathered.keys, gathered.values, gathered.block_table, gathered.row_slot)

    def _write(self) -> None:
        k_cache, v_cache, scales = self.cache
        ops.kv_write(self.key, self.value, k_cache, v_cache, self.args.slot_mapping, scales)

    def _attend(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, row_slot: torch.Tensor
    ) -> None:
        model, a, scales = self.model, self.args, self.cache.scales
        if model.batch_invariant:
            ops.invariant_attention(
                self.query,
                k_cache,
                v_cache,
                block_table,
                row_slot,
                a.query_start,
                a.seq_lens,
                model.scale,
                a.num_rows,
                self.out,
                scales,
            )
            return
        tiles = a.tiles if a.query_len == 0 else None
        if a.flash is not None:
            ops.flash_attention(self.query, k_cache, v_cache, a.flash, model.scale, self.out)
        else:
            ops.attention(
                self.query,
                k_cache,
                v_cache,
                block_table,
                row_slot,
                a.query_start,
                a.seq_lens,
                model.scale,
                a.query_len,
                a.num_rows,
                a.num_splits,
                self.out,
                scales,
                tiles is None,
            )
        if tiles is not None:
            ops.attend_tiles(self.query, k_cache, v_cache, *self._tiles_args(tiles))
