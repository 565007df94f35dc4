"""CUDA implementations of the fused projections for a few rows: a step that reads every weight once, and little else.

At a few rows a projection is a stream of weights from device memory. Four things keep the stream from pausing:

- Programs are persistent (one wave, a few per multiprocessor). Each walks over blocks of output rows and loads the next
  tile of weights before it is done with the present one.
- A kernel lets its successor start at once, and starts itself while its predecessor still runs (programmatic dependent
  launch). What it does before `gdc_wait` is load its first weights into registers and ask for the next ones in L2.
- The norm in front, and the activation or the residual add behind, are part of the kernel: every program normalises
  the few rows itself, which costs a read of some kilobytes from L2 and saves a kernel.
- Weights pass through the caches as first to evict, so that the rows stay.

Order of memory accesses. Only weights, which no kernel of a step writes, are read before the wait. The wait returns
when all kernels launched before have finished: the predecessor, and, since it waited too, everything before it. So all
that a step's kernels produce is read after the wait, and nothing is overwritten (the residual is, in place) before its
last reader is done. Kernels launched without the attribute wait for everything anyhow.

Rounding is that of the separate ops: the normed row, a linear's output and silu are rounded to the tensors' type, sums
of products are float32. Which kernel runs, `triton_few_fma`'s or `triton_few_dot`'s, and how it is tiled, is for
`few_configs` to say.

Legend: T rows, C hidden size, K inputs and N outputs of a projection, I intermediate size.
"""

from __future__ import annotations

from torch import Tensor

from ostinato.kernels.few_configs import MAX_FEW_ROWS, FewConfig, Kind, few_config
from ostinato.kernels.triton_few_dot import dot_kernel
from ostinato.kernels.triton_few_fma import linear_residual_kernel, norm_linear_kernel
from ostinato.kernels.triton_launch import early, num_multiprocessors

__all__ = ["few_gate_up_silu", "few_linear_residual", "few_norm_linear", "launch"]


def few_norm_linear(
    residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
) -> None:
    """See `ops.few_norm_linear`."""
    launch(_config("norm", residual, out), "norm", residual, norm_weight, weight, bias, eps, out)


def few_gate_up_silu(
    residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
) -> None:
    """See `ops.few_gate_up_silu`."""
    launch(_config("gated", residual, out), "gated", residual, norm_weight, weight, bias, eps, out)


def few_linear_residual(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """See `ops.few_linear_residual`."""
    launch(_config("residual", x, residual), "residual", x, None, weight, bias, 0.0, residual)


def launch(
    config: FewConfig,
    kind: Kind,
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
) -> None:
    """Any of the three ops with a given config. Residual: `out` is added to, `norm_weight` is None, `eps` not read."""
    (num_rows, num_out), size = out.shape, weight.shape[1]
    grid = (config.num_programs(num_out, num_multiprocessors(weight.device)),)
    strides = (x.stride(0), out.stride(0))
    compile_time = {
        **config.tile(),
        "SIZE": size,
        "T": num_rows,
        "LANES": 32 * config.num_warps,
        "HAS_BIAS": bias is not None,
        **early(weight.device),
        "num_warps": config.num_warps,
        "num_stages": 1,  # more would put the loop's loads behind copies to shared memory, and in front of the wait
        "maxnreg": config.max_registers,
    }
    gated = kind == "gated"
    if config.dot:
        dot_kernel[grid](
            x, norm_weight, weight, bias, out, eps, num_out, *strides, config.prefetch,
            NORM=kind != "residual", GATED=gated, ADD=kind == "residual", **compile_time,
        )  # fmt: skip
    elif kind == "residual":
        linear_residual_kernel[grid](x, weight, bias, out, num_out, *strides, config.prefetch, **compile_time)
    else:
        norm_linear_kernel[grid](
            x, norm_weight, weight, bias, out, eps, num_out, *strides, config.prefetch, GATED=gated, **compile_time
        )


def _config(kind: Kind, x: Tensor, out: Tensor) -> FewConfig:
    num_rows, size = x.shape
    if not 1 <= num_rows <= MAX_FEW_ROWS:
        raise ValueError(f"the few-row kernels take 1 to {MAX_FEW_ROWS} rows, got {num_rows}; use the separate ops")
    return few_config(kind, out.shape[1], size, num_rows)
