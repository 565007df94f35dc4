"""The ops that choose tokens, and the parameters they choose by. Part of `ops`, which is what others import.

The legend is there.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.op_library import Op, no_output, register

__all__ = ["SamplingState", "logprobs", "sample", "small_linear_sample"]


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


_STATE: Final = ", ".join(f"Tensor {name}" for name in SamplingState._fields)

_OPS: Final = (
    Op(
        "sample",
        "reference_sampling",
        "triton_sampling",
        f"(Tensor logits, Tensor row_slot, {_STATE}, Tensor(a!) adjusted, Tensor(b!) sampled) -> ()",
        no_output,
    ),
    Op(
        "small_linear_sample",
        "reference_small",
        "triton_small_head",
        f"(Tensor x, Tensor weight, Tensor row_slot, {_STATE}, Tensor num_logprobs, Tensor(a!) logits, "
        "Tensor(b!) adjusted, Tensor(c!) sampled) -> ()",
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
)

register(_OPS)

_sample: Final = torch.ops.ostinato.sample.default
_small_linear_sample: Final = torch.ops.ostinato.small_linear_sample.default
_logprobs: Final = torch.ops.ostinato.logprobs.default


def sample(logits: Tensor, row_slot: Tensor, state: SamplingState, adjusted: Tensor, sampled: Tensor) -> None:
    """Chooses one token per row; the algorithm is spelled out in `reference_sampling`.

    `logits [R, V]`, `row_slot [>=R]`, `adjusted! [>=R, V]` float32 (a workspace: logits after bias and penalties, of
    the rows whose flags ask for them), `sampled! [Rmax]`: -1 for scratch rows and rows from R on. A row's draw
    depends on its seed, its number of known tokens and its logits alone. Logits without any finite value give 0.
    """
    _sample(logits, row_slot, *state, adjusted, sampled)


def small_linear_sample(
    x: Tensor,
    weight: Tensor,
    row_slot: Tensor,
    state: SamplingState,
    num_logprobs: Tensor,
    logits: Tensor,
    adjusted: Tensor,
    sampled: Tensor,
) -> None:
    """`small_linear` of the head and `sample` in one: the same tokens as theirs, without most of the logits.

    `x [R, K]`, `weight [V, K]` contiguous, both of the dtype of `logits! [R, V]`; the rest as in `sample`. Logits are
    written for the rows alone that somebody may ask for them (`reference_sampling.stores_logits`): those with flags,
    with filters where they apply, or with `num_logprobs [S]` from 0 on. Rows that are not written keep what was there.
    On CUDA a shape for which `small_configs.head_config` has no config is refused (ValueError); of the weights holds
    what `small_linear` says.
    """
    _small_linear_sample(x, weight, row_slot, *state, num_logprobs, logits, adjusted, sampled)


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
