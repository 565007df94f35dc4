"""Log-probabilities on their way to the host. Rows that ask for none cost nothing here.

V vocabulary, K alternatives asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ostinato.kernels import ops
from ostinato.models.decoder import Decoder
from ostinato.runner.inputs import LOGPROB_COLUMNS, StepBuffers
from ostinato.step import PromptRows, TokenLogprobs

_CHUNK_ROWS = 64  # prompt positions whose [V] logits exist at once


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Host copies of the step's tables, complete once the step's event has passed."""

    values: torch.Tensor  # [R, 22] float32
    ids: torch.Tensor  # [R, 22] int32

    def rows(self, wanted: Sequence[int], tokens: Sequence[int]) -> tuple[TokenLogprobs | None, ...]:
        """One entry a row; None for rows that asked for none or did not sample."""
        values, ids = self.values.tolist(), self.ids.tolist()
        return tuple(
            TokenLogprobs(token, values[r][0], ids[r][1], tuple(ids[r][2 : 2 + k]), tuple(values[r][2 : 2 + k]))
            if k >= 0 and token >= 0
            else None
            for r, (k, token) in enumerate(zip(wanted, tokens, strict=True))
        )


def fetch(buffers: StepBuffers, num_rows: int) -> StepLogprobs:
    """Starts the copies behind the step; does not wait."""
    return StepLogprobs(_to_host(buffers.logprob_values[:num_rows]), _to_host(buffers.logprob_ids[:num_rows]))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens from number `first` on; device tensors until read."""

    first: int
    target_ids: tuple[int, ...]
    chosen: torch.Tensor  # [n] float32
    ranks: torch.Tensor  # [n] int32
    top_values: torch.Tensor  # [n, K] float32
    top_ids: torch.Tensor  # [n, K] int32

    def rows(self) -> PromptRows:
        chosen, ranks = self.chosen.tolist(), self.ranks.tolist()
        values, ids = self.top_values.tolist(), self.top_ids.tolist()
        rows = tuple(
            TokenLogprobs(token, chosen[i], ranks[i], tuple(ids[i]), tuple(values[i]))
            for i, token in enumerate(self.target_ids)
        )
        return PromptRows(self.first, rows)


def prompt_logprobs(
    model: Decoder, stream: torch.Tensor, first: int, target_ids: Sequence[int], num_top: int
) -> PromptLogprobs:
    """`stream` [n, hidden] are the final states, before the norm, that predict `target_ids`, the prompt's tokens from
    number `first` on. Eager, behind the step.

    Through the op that serves outputs too: torch's log_softmax on CUDA sums a row in an order that depends on the row's
    alignment, so on its place among the others where V is odd.
    """
    num_tokens, device = len(target_ids), stream.device
    targets = torch.tensor(target_ids, dtype=torch.int32, device=device)
    values = torch.empty((num_tokens, LOGPROB_COLUMNS), device=device)
    ids = torch.empty((num_tokens, LOGPROB_COLUMNS), dtype=torch.int32, device=device)
    every_row = torch.arange(min(num_tokens, _CHUNK_ROWS), dtype=torch.int32, device=device)
    wanted = torch.full((every_row.shape[0] + 1,), num_top, dtype=torch.int32, device=device)  # + 1: the scratch row
    for begin in range(0, num_tokens, _CHUNK_ROWS):
        part = slice(begin, min(begin + _CHUNK_ROWS, num_tokens))
        # a copy, so that the rows' address is aligned wherever in the step they stand
        rows = stream[part].clone()
        logits = model.logits(rows, rows.new_empty((rows.shape[0], model.config.vocab_size)))
        ops.logprobs(logits, every_row, wanted, targets[part], values[part], ids[part])
    top = slice(2, 2 + num_top)
    return PromptLogprobs(first, tuple(target_ids), values[:, 0], ids[:, 1], values[:, top], ids[:, top])
