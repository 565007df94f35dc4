"""The matrix products of a layer and what is fused around them, in five versions that compute the same.

`stream` is the residual stream [T, C]. A version either adds what attention and MLP give to it at once, or hands it on
as `delta` for the next norm to add: `mlp` returns what is still to be added, or None. With two dimensions `delta` is
[T, C] of the stream's dtype; with three it is [P, T, C] float32, whose sum over P is to be added. It is read by the
version that made it: by `qkv` of the next layer, or by `finish` behind the last one.

T tokens of the step, R rows, C hidden size, V vocabulary, P parts of a product (`kernels.small_configs`).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from ostinato.kernels import ops
from ostinato.kernels.small_configs import small_config
from ostinato.models.weights import DecoderWeights, LayerWeights


class Projections(Protocol):
    def qkv(
        self, layer: LayerWeights, delta: torch.Tensor | None, stream: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """Adds `delta` to the stream; `out` [T, (H + 2G) * D] is q, k and v of the normed stream."""

    def mlp(
        self, layer: LayerWeights, attention_out: torch.Tensor, stream: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        """Output projection, norm and MLP. Returns what is still to be added to the stream (see above)."""

    def finish(self, delta: torch.Tensor | None, stream: torch.Tensor) -> None:
        """Adds the last layer's `delta` to the stream."""

    def head(self, weights: DecoderWeights, stream: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """`out` [R, V] are the logits of `stream` [R, C]."""


class _PlainDelta:
    """`delta` is [T, C]."""

    def finish(self, delta: torch.Tensor | None, stream: torch.Tensor) -> None:
        if delta is not None:
            stream.add_(delta)


class PlainProjections(_PlainDelta):
    """cuBLAS (or the CPU's library) and one kernel for everything between: any number of tokens."""

    def qkv(
        self, layer: LayerWeights, delta: torch.Tensor | None, stream: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        if delta is None:
            normed = ops.rms_norm(stream, layer.input_norm, eps)
        else:
            normed = ops.add_rms_norm(delta, stream, layer.input_norm, eps)
        if layer.qkv_bias is None:
            torch.mm(normed, layer.qkv.t(), out=out)
        else:
            torch.addmm(layer.qkv_bias, normed, layer.qkv.t(), out=out)

    def mlp(
        self, layer: LayerWeights, attention_out: torch.Tensor, stream: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        delta = F.linear(attention_out, layer.o, layer.o_bias)
        normed = ops.add_rms_norm(delta, stream, layer.post_norm, eps)
        gate_up = F.linear(normed, layer.gate_up, layer.gate_up_bias)
        return F.linear(ops.silu_mul(gate_up), layer.down, layer.down_bias)

    def head(self, weights: DecoderWeights, stream: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        torch.mm(ops.rms_norm(stream, weights.norm, eps), weights.head.t(), out=out)


class FewRowProjections:
    """CUDA, a few rows: products that stream the weights once, with norm, activation and residual inside."""

    def qkv(
        self, layer: LayerWeights, delta: torch.Tensor | None, stream: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        ops.few_norm_linear(stream, layer.input_norm, layer.qkv, layer.qkv_bias, eps, out)

    def mlp(
        self, layer: LayerWeights, attention_out: torch.Tensor, stream: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        ops.few_linear_residual(attention_out, layer.o, layer.o_bias, stream)
        gated = stream.new_empty((stream.shape[0], layer.down.shape[1]))
        ops.few_gate_up_silu(stream, layer.post_norm, layer.gate_up, layer.gate_up_bias, eps, gated)
        ops.few_linear_residual(gated, layer.down, layer.down_bias, stream)
        return None

    def finish(self, delta: torch.Tensor | None, stream: torch.Tensor) -> None:
        """There is never anything left to add."""

    def head(self, weights: DecoderWeights, stream: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        ops.few_norm_linear(stream, weights.norm, weights.head, None, eps, out)


class SmallProjections:
    """CUDA in 16-bit types, some rows (up to `small_configs.MAX_SMALL_ROWS`): for each product the kernel for its
    shape, or cuBLAS and the separate ops where these are faster. O and down leave their parts to the norm behind
    them."""

    def qkv(
        self, layer: LayerWeights, delta: torch.Tensor | None, stream: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        _small_linear(_add_norm(delta, stream, layer.input_norm, eps), layer.qkv, layer.qkv_bias, out)

    def mlp(
        self, layer: LayerWeights, attention_out: torch.Tensor, stream: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        delta = _small_parts(attention_out, layer.o, layer.o_bias)
        normed = _add_norm(delta, stream, layer.post_norm, eps)
        num_rows, (num_out, size) = stream.shape[0], (layer.down.shape[1], layer.gate_up.shape[1])
        if small_config("gated", num_out, size, num_rows) is None:
            gated = ops.silu_mul(F.linear(normed, layer.gate_up, layer.gate_up_bias))
        else:
            gated = stream.new_empty((num_rows, num_out))
            ops.small_gate_up_silu(normed, layer.gate_up, layer.gate_up_bias, gated)
        return _small_parts(gated, layer.down, layer.down_bias)

    def finish(self, delta: torch.Tensor | None, stream: torch.Tensor) -> None:
        if delta is None:
            return
        if delta.dim() == 3:
            ops.add_parts(delta, stream)
        else:
            stream.add_(delta)

    def head(self, weights: DecoderWeights, stream: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        _small_linear(ops.rms_norm(stream, weights.norm, eps), weights.head, None, out)


def _add_norm(delta: torch.Tensor | None, stream: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if delta is None:
        return ops.rms_norm(stream, weight, eps)
    if delta.dim() == 3:
        return ops.add_parts_rms_norm(delta, stream, weight, eps)
    return ops.add_rms_norm(delta, stream, weight, eps)


def _small_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if small_config("plain", *weight.shape, x.shape[0]) is not None:
        ops.small_linear(x, weight, bias, out)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _small_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[P, T, N] float32, or [T, N] where cuBLAS is faster."""
    config = small_config("parts", *weight.shape, x.shape[0])
    if config is None:
        return F.linear(x, weight, bias)
    parts = x.new_empty((config.num_parts, x.shape[0], weight.shape[0]), dtype=torch.float32)
    ops.small_linear_parts(x, weight, bias, parts)
    return parts


class InvariantProjections(_PlainDelta):
    """Any number of tokens, each with the same bits whatever the others are (`ops.invariant_linear`)."""

    def qkv(
        self, layer: LayerWeights, delta: torch.Tensor | None, stream: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        if delta is None:
            normed = ops.rms_norm(stream, layer.input_norm, eps)
        else:
            normed = ops.add_rms_norm(delta, stream, layer.input_norm, eps)
        ops.invariant_linear(normed, layer.qkv, layer.qkv_bias, out)

    def mlp(
        self, layer: LayerWeights, attention_out: torch.Tensor, stream: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        delta = _invariant_linear(attention_out, layer.o, layer.o_bias)
        normed = ops.add_rms_norm(delta, stream, layer.post_norm, eps)
        gate_up = _invariant_linear(normed, layer.gate_up, layer.gate_up_bias)
        return _invariant_linear(ops.invariant_silu_mul(gate_up), layer.down, layer.down_bias)

    def head(self, weights: DecoderWeights, stream: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        ops.invariant_linear(ops.rms_norm(stream, weights.norm, eps), weights.head, None, out)


def _invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.new_empty((x.shape[0], weight.shape[0]))
    ops.invariant_linear(x, weight, bias, out)
    return out


class CompiledProjections(PlainProjections):
    """`torch.compile` over the functions of a layer (`models.compiled`); the head stays plain."""

    def qkv(
        self, layer: LayerWeights, delta: torch.Tensor | None, stream: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        from ostinato.models.compiled import layer_input

        layer_input(delta, stream, layer.input_norm, layer.qkv, layer.qkv_bias, eps, out)

    def mlp(
        self, layer: LayerWeights, attention_out: torch.Tensor, stream: torch.Tensor, eps: float
    ) -> torch.Tensor | None:
        from ostinato.models.compiled import layer_mlp

        delta = torch.empty_like(stream)
        layer_mlp(
            attention_out,
            stream,
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
