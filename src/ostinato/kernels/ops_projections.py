"""The ops that are matrix products with what is fused around them, `invariant_linear` among them. Part of `ops`, which
is what others import.

Legend: T rows, K inputs and N outputs of a product, P parts of its inputs, C hidden size, I intermediate size. For the
rest see `ops`.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from ostinato.kernels.op_library import Op, no_output, register

__all__ = [
    "add_parts",
    "add_parts_rms_norm",
    "few_gate_up_silu",
    "few_linear_residual",
    "few_norm_linear",
    "invariant_linear",
    "small_gate_up_silu",
    "small_linear",
    "small_linear_parts",
]


def _like_residual(parts: Tensor, residual: Tensor, *_: Any) -> Tensor:
    return residual.new_empty(residual.shape)


_OPS: Final = (
    Op(
        "few_norm_linear",
        "reference_few",
        "triton_few",
        "(Tensor residual, Tensor norm_weight, Tensor weight, Tensor? bias, float eps, Tensor(a!) out) -> ()",
        no_output,
    ),
    Op(
        "few_gate_up_silu",
        "reference_few",
        "triton_few",
        "(Tensor residual, Tensor norm_weight, Tensor weight, Tensor? bias, float eps, Tensor(a!) out) -> ()",
        no_output,
    ),
    Op(
        "few_linear_residual",
        "reference_few",
        "triton_few",
        "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) residual) -> ()",
        no_output,
    ),
    Op(
        "small_linear",
        "reference_small",
        "triton_small",
        "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()",
        no_output,
    ),
    Op(
        "small_gate_up_silu",
        "reference_small",
        "triton_small",
        "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()",
        no_output,
    ),
    Op(
        "small_linear_parts",
        "reference_small",
        "triton_small",
        "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) parts) -> ()",
        no_output,
    ),
    Op(
        "add_parts_rms_norm",
        "reference_small",
        "triton_small",
        "(Tensor parts, Tensor(a!) residual, Tensor norm_weight, float eps) -> Tensor",
        _like_residual,
    ),
    Op(
        "add_parts",
        "reference_small",
        "triton_small",
        "(Tensor parts, Tensor(a!) residual) -> ()",
        no_output,
    ),
    Op(
        "invariant_linear",
        "reference_invariant",
        "triton_invariant",
        "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()",
        no_output,
    ),
)
register(_OPS)

_few_norm_linear: Final = torch.ops.ostinato.few_norm_linear.default
_few_gate_up_silu: Final = torch.ops.ostinato.few_gate_up_silu.default
_few_linear_residual: Final = torch.ops.ostinato.few_linear_residual.default
_small_linear: Final = torch.ops.ostinato.small_linear.default
_small_gate_up_silu: Final = torch.ops.ostinato.small_gate_up_silu.default
_small_linear_parts: Final = torch.ops.ostinato.small_linear_parts.default
_add_parts_rms_norm: Final = torch.ops.ostinato.add_parts_rms_norm.default
_add_parts: Final = torch.ops.ostinato.add_parts.default
_invariant_linear: Final = torch.ops.ostinato.invariant_linear.default


def few_norm_linear(
    residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
) -> None:
    """`out = rms_norm(residual, norm_weight, eps) @ weight.T + bias` for a few rows: QKV, or the final norm and head.

    `residual [T, C]`, `norm_weight [C]`, `weight [N, C]` contiguous, `bias [N]`, `out! [T, N]`. On CUDA T is 1 to
    `few_configs.MAX_FEW_ROWS` (ValueError), and the weights may be read before kernels launched earlier have finished:
    no kernel may write to them in the same step. Rounded like the separate ops, as are the other two `few` ops.
    """
    _few_norm_linear(residual, norm_weight, weight, bias, eps, out)


def few_gate_up_silu(
    residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
) -> None:
    """`out = silu_mul(rms_norm(residual, norm_weight, eps) @ weight.T + bias)` for a few rows.

    `residual [T, C]`, `norm_weight [C]`, `weight [2 I, C]` contiguous, the gate's rows first, `bias [2 I]`,
    `out! [T, I]`. Otherwise as `few_norm_linear`.
    """
    _few_gate_up_silu(residual, norm_weight, weight, bias, eps, out)


def few_linear_residual(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """`residual += x @ weight.T + bias` for a few rows; the linear's output is rounded, then the sum.

    `x [T, K]`, `weight [C, K]` contiguous, `bias [C]`, `residual! [T, C]`. Otherwise as `few_norm_linear`.
    """
    _few_linear_residual(x, weight, bias, residual)


def small_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`out = x @ weight.T + bias` for some rows: QKV, or the head.

    `x [T, K]`, `weight [N, K]` contiguous, `bias [N]`, `out! [T, N]`, all of one dtype. Sums of products, bias
    included, are float32 and rounded once. On CUDA a shape for which `small_configs.small_config` has no config is
    refused (ValueError), and the weights may be read before kernels launched earlier have finished: no kernel may write
    to them in the same step. Both hold for the other two `small` ops too.
    """
    _small_linear(x, weight, bias, out)


def small_gate_up_silu(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`out = silu_mul(x @ weight.T + bias)` for some rows; the linear's output is rounded, then silu.

    `x [T, C]`, `weight [2 I, C]` contiguous, the gate's rows first, `bias [2 I]`, `out! [T, I]`. See `small_linear`.
    """
    _small_gate_up_silu(x, weight, bias, out)


def small_linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None, parts: Tensor) -> None:
    """A linear for some rows as parts whose sum over P is `x @ weight.T + bias`: O and down.

    `x [T, K]`, `weight [N, K]` contiguous, `bias [N]`, `parts! [P, T, N]` float32. How much is in which part is up to
    the implementation. See `small_linear`; read them with `add_parts_rms_norm` or `add_parts`.
    """
    _small_linear_parts(x, weight, bias, parts)


def add_parts_rms_norm(parts: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """Adds the sum of `parts [P, T, C]` to `residual! [T, C]` and returns `rms_norm(residual, norm_weight, eps)`.

    `parts` is contiguous float32, and added up in float32 in the order of the parts; the sum is rounded to the
    residual's dtype, as a linear's output is, and then what it is added to.
    """
    out: Tensor = _add_parts_rms_norm(parts, residual, norm_weight, eps)
    return out


def add_parts(parts: Tensor, residual: Tensor) -> None:
    """The same without a norm: adds the sum of `parts [P, T, C]` to `residual! [T, C]`."""
    _add_parts(parts, residual)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`out = x @ weight.T + bias`, where a row of `out` has the same bits whatever other rows there are.

    `x [T, K]`, `weight [N, K]` contiguous, `bias [N]`, `out! [T, N]`, all of one dtype. Products are summed in float32
    in an order that K, N and the dtype determine, and the sum, bias included, is rounded once.
    """
    _invariant_linear(x, weight, bias, out)
