"""The forward pass of a decoder, written once for Llama, Mistral, Qwen2 and Qwen3.

It works at fixed addresses: token ids and positions come from the step buffers; q, k, v and the attention output pass
through two workspaces that every layer and every recording share, so that an eager attention between two graphs
exchanges nothing but those. `cut("attention", op)` marks the place where a recording may be cut.

Shapes: T tokens of the step, H query heads, G key/value heads, D head size, N blocks, B block size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ostinato.kernels import ops
from ostinato.models.config import ModelConfig
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
    num_rows: int
    query_len: int  # 0: ragged
    num_splits: int


@dataclass(frozen=True, slots=True)
class Workspace:
    """Fixed buffers that all layers share."""

    qkv: torch.Tensor  # [Tmax, (H + 2G) * D]
    attention_out: torch.Tensor  # [Tmax, H * D]
    hidden: torch.Tensor  # [Tmax, hidden]: the last norm's output


class Decoder:
    """Parameters and the forward pass. Holds no request state and no cache."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, *, max_model_len: int, compile_layers: bool = False
    ) -> None:
        self.config = config
        self.weights = weights
        self.cos_sin = cos_sin_table(config.rope, config.rotary_dim, max_model_len, weights.embed.device)
        self.scale = config.head_dim**-0.5
        self._qkv, self._mlp = (_compiled_qkv, _compiled_mlp) if compile_layers else (_qkv, _mlp)

    def forward(
        self,
        token_ids: torch.Tensor,  # [T] int32
        positions: torch.Tensor,  # [T] int32
        caches: list[tuple[torch.Tensor, torch.Tensor]],  # per layer: K and V, each [N, B, G, D], strided
        args: AttentionArgs,
        work: Workspace,
        cut: Cut,
    ) -> None:
        """Leaves the normed hidden states of all T tokens in `work.hidden[:T]`."""
        num_tokens, eps = token_ids.shape[0], self.config.rms_norm_eps
        qkv, attention_out = work.qkv[:num_tokens], work.attention_out[:num_tokens]
        query, key, value = self._split(qkv)
        out = attention_out.view(num_tokens, self.config.num_heads, self.config.head_dim)

        residual = F.embedding(token_ids, self.weights.embed)
        delta: torch.Tensor | None = None
        for layer, (k_cache, v_cache) in zip(self.weights.layers, caches, strict=True):
            self._qkv(layer, delta, residual, eps, qkv)
            ops.rope(query, key, positions, self.cos_sin, layer.q_norm, layer.k_norm, eps)
            cut("attention", _Attention(query, key, value, k_cache, v_cache, args, self.scale, out))
            delta = self._mlp(layer, attention_out, residual, eps)
        assert delta is not None
        work.hidden[:num_tokens].copy_(ops.add_rms_norm(delta, residual, self.weights.norm, eps))

    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, V], written to `out`."""
        return torch.mm(hidden, self.weights.head.t(), out=out)

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
    of fixed buffers only, so that a recording which keeps it keeps no memory of the graph pool alive."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    args: AttentionArgs
    scale: float
    out: torch.Tensor

    def __call__(self) -> None:
        a = self.args
        ops.kv_write(self.key, self.value, self.k_cache, self.v_cache, a.slot_mapping)
        ops.attention(
            self.query,
            self.k_cache,
            self.v_cache,
            a.block_table,
            a.row_slot,
            a.query_start,
            a.seq_lens,
            self.scale,
            a.query_len,
            a.num_rows,
            a.num_splits,
            self.out,
        )


def _qkv(
    layer: LayerWeights, delta: torch.Tensor | None, residual: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    if delta is None:
        normed = ops.rms_norm(residual, layer.input_norm, eps)
    else:
        normed = ops.add_rms_norm(delta, residual, layer.input_norm, eps)
    if layer.qkv_bias is None:
        torch.mm(normed, layer.qkv.t(), out=out)
    else:
        torch.addmm(layer.qkv_bias, normed, layer.qkv.t(), out=out)


def _mlp(layer: LayerWeights, attention_out: torch.Tensor, residual: torch.Tensor, eps: float) -> torch.Tensor:
    delta = F.linear(attention_out, layer.o, layer.o_bias)
    normed = ops.add_rms_norm(delta, residual, layer.post_norm, eps)
    gate_up = F.linear(normed, layer.gate_up, layer.gate_up_bias)
    return F.linear(ops.silu_mul(gate_up), layer.down, layer.down_bias)


def _compiled_qkv(
    layer: LayerWeights, delta: torch.Tensor | None, residual: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    from ostinato.models.compiled import layer_input

    layer_input(delta, residual, layer.input_norm, layer.qkv, layer.qkv_bias, eps, out)


def _compiled_mlp(
    layer: LayerWeights, attention_out: torch.Tensor, residual: torch.Tensor, eps: float
) -> torch.Tensor:
    from ostinato.models.compiled import layer_mlp

    delta = torch.empty_like(residual)
    layer_mlp(
        attention_out,
        residual,
        layer.o,
        layer.o_bias,
        layer.post_norm,
        layer.gate_up,
        layer.gate_up_bias,
        layer.down,
        layer.down_bias,
        eps,
        delta,
    )
    return delta
