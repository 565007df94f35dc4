"""Both implementations of each op side by side, and the state tensors they take."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.kernels import ops

GPU = torch.cuda.is_available()
REFERENCE, SAMPLING = "reference", "reference_sampling"
MODULES = {
    "prepare": (REFERENCE, "triton_step"),
    "embed": (REFERENCE, "triton_step"),
    "scatter": (REFERENCE, "triton_step"),
    "advance": (REFERENCE, "triton_step"),
    "rms_norm": (REFERENCE, "triton_elementwise"),
    "add_rms_norm": (REFERENCE, "triton_elementwise"),
    "rope": (REFERENCE, "triton_elementwise"),
    "silu_mul": (REFERENCE, "triton_elementwise"),
    "sample": (SAMPLING, "triton_sampling"),
    "logprobs": (SAMPLING, "triton_logprobs"),
}


@dataclass(frozen=True)
class Implementation:
    """The ops as torch functions on the CPU, or as Triton kernels on a GPU or in the interpreter."""

    name: str
    device: str

    def __getattr__(self, op: str) -> Callable[..., Any]:
        module = MODULES[op][self.name == "triton"]
        function: Callable[..., Any] = getattr(importlib.import_module(f"ostinato.kernels.{module}"), op)
        return function

    def ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


TORCH = Implementation("torch", "cpu")
TRITON = Implementation("triton", "cuda" if GPU else "cpu")


def require_triton() -> None:
    """Skips the test where Triton kernels cannot run."""
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if not GPU and not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported without its interpreter and there is no GPU")


def sampling_state(num_slots: int, num_vocab: int, **given: list[float] | Tensor) -> ops.SamplingState:
    """Neutral parameters for S rows, but for those given, whose first rows are set. Seeds and lengths differ by row."""

    def ints(value: int, *more: int) -> Tensor:
        return torch.full((num_slots, *more), value, dtype=torch.int32)

    row = torch.arange(num_slots, dtype=torch.int32)
    state = ops.SamplingState(
        temperature=torch.zeros(num_slots),
        top_p=torch.ones(num_slots),
        min_p=torch.zeros(num_slots),
        repetition_penalty=torch.ones(num_slots),
        presence_penalty=torch.zeros(num_slots),
        frequency_penalty=torch.zeros(num_slots),
        top_k=ints(0),
        seed_lo=row * 7919 - 3,
        seed_hi=-row * 104729,
        min_length=ints(0),
        num_tokens=5 + 2 * row,
        stop_ids=ints(-1, 64),
        bias_ids=ints(-1, 300),
        bias_values=torch.zeros(num_slots, 300),
        output_counts=ints(0, num_vocab),
        in_prompt=torch.zeros(num_slots, num_vocab, dtype=torch.bool),
        allowed=ints(-1, -(-num_vocab // 32)),
        flags=ints(0),
    )
    for name, values in given.items():
        tensor: Tensor = getattr(state, name)
        rows = torch.as_tensor(values, dtype=tensor.dtype)
        tensor[: rows.shape[0]] = rows
    return state


def draw(
    implementation: Implementation, logits: Tensor, row_slot: list[int], state: ops.SamplingState, max_rows: int = 0
) -> tuple[list[int], Tensor]:
    """The sampled tokens of all rows up to `max_rows`, and the workspace, which was NaN before."""
    device = implementation.device
    num_rows = max(max_rows, logits.shape[0])
    adjusted = torch.full((num_rows, logits.shape[1]), float("nan"), device=device)
    sampled = torch.full((num_rows,), 99, dtype=torch.int32, device=device)
    tensors = (tensor.to(device) for tensor in state)
    implementation.sample(logits.to(device), implementation.ints(*row_slot), *tensors, adjusted, sampled)
    return sampled.tolist(), adjusted.cpu()
