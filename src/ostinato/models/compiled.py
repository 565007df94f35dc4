"""The two functions of a layer, through `torch.compile`: what `compile=True` runs instead of the kernels' norms and
activations. Attention, rope and the KV write stay kernels.

Each is registered as one op that declares what it writes. A recording, tape or graph, thus holds it like any other op,
and neither Dynamo nor a dispatch mode sees the inside of the other. Imported only when asked for.

T tokens of the step, C hidden size, I intermediate size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _input(
    delta: torch.Tensor | None,  # [T, C]: what the previous layer adds; None before the first
    residual: torch.Tensor,  # [T, C], updated
    norm: torch.Tensor,
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,  # [T, (H + 2G) * D], written
) -> None:
    if delta is not None:
        residual.add_(delta)
    out.copy_(F.linear(_norm(residual, norm, eps), qkv, bias))


def _mlp(
    attention_out: torch.Tensor,  # [T, H * D]
    residual: torch.Tensor,  # [T, C], updated
    o: torch.Tensor,
    o_bias: torch.Tensor | None,
    norm: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,  # [T, C], written
) -> None:
    residual.add_(F.linear(attention_out, o, o_bias))
    gate, up = F.linear(_norm(residual, norm, eps), gate_up, gate_up_bias).chunk(2, dim=-1)
    out.copy_(F.linear(F.silu(gate) * up, down, down_bias))


def _nothing(*_: object) -> None:
    """Shapes only: both ops return nothing."""


def _register() -> torch.library.Library:
    library = torch.library.Library("ostinato_compiled", "DEF")
    library.define(
        "input(Tensor? delta, Tensor(a!) residual, Tensor norm, Tensor qkv, Tensor? bias, float eps, "
        "Tensor(b!) out) -> ()"
    )
    library.define(
        "mlp(Tensor attention_out, Tensor(a!) residual, Tensor o, Tensor? o_bias, Tensor norm, Tensor gate_up, "
        "Tensor? gate_up_bias, Tensor down, Tensor? down_bias, float eps, Tensor(b!) out) -> ()"
    )
    for name, function in (("input", _input), ("mlp", _mlp)):
        compiled = torch.compile(function, dynamic=True)
        for key in ("CPU", "CUDA"):
            library.impl(name, compiled, key)
        library.impl(name, _nothing, "Meta")
    return library


_LIBRARY = _register()  # the registration lasts as long as this object
layer_input = torch.ops.ostinato_compiled.input.default
layer_mlp = torch.ops.ostinato_compiled.mlp.default
