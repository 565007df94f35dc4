"""The fixed buffers of a step: what `prepare` derives, what the layers share, what comes out.

Every recording reads and writes these addresses; they are sized for the largest step and never move. R rows at most,
T tokens at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from ostinato.models.config import ModelConfig
from ostinato.models.decoder import Workspace

LOGPROB_COLUMNS = 22
"""The sampled token's, the log-sum-exp (its rank in the id table), and 20 alternatives."""


class StepBuffers:
    """`pads` names the value that each derived input holds outside the live part of a step."""

    pads: ClassVar = {
        "token_ids": 0,
        "positions": 0,
        "slot_mapping": -1,
        "seq_lens": 0,
        "logit_index": 0,
        "sampled": -1,
    }

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_rows: int,
        max_tokens: int,
        ring_depth: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def ints(size: int, pad: int) -> torch.Tensor:
            return torch.full((size,), pad, dtype=torch.int32, device=device)

        def floats(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.max_rows, self.max_tokens, self.ring_depth = max_rows, max_tokens, ring_depth
        self.token_ids = ints(max_tokens, 0)
        self.positions = ints(max_tokens, 0)
        self.slot_mapping = ints(max_tokens, -1)
        self.seq_lens = ints(max_rows, 0)
        self.logit_index = ints(max_rows, 0)
        self.sampled = ints(max_rows, -1)
        self.work = Workspace(
            stream=floats(max_tokens, config.hidden_size),
            qkv=floats(max_tokens, config.qkv_size),
            attention_out=floats(max_tokens, config.query_size),
        )
        # zero between steps: the last program of a row and head to finish resets its own
        self.attention_counters = ints(max_rows * config.num_kv_heads, 0)
        self.logits = floats(max_rows, config.vocab_size)
        self.adjusted = floats(max_rows, config.vocab_size, kind=torch.float32)
        self.logprob_values = floats(max_rows, LOGPROB_COLUMNS, kind=torch.float32)
        self.logprob_ids = torch.zeros((max_rows, LOGPROB_COLUMNS), dtype=torch.int32, device=device)
        # The graph writes sampled tokens straight to host memory, one row of the ring per step, so that reading a
        # step's tokens needs no copy after the launch.
        self.ring = torch.full((ring_depth, max_rows), -1, dtype=torch.int32, pin_memory=device.type == "cuda")

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in (*self.pads, "attention_counters", "logits", "adjusted", "logprob_values", "logprob_ids", "ring"):
            yield f"inputs.{name}", getattr(self, name)
        for name in ("stream", "qkv", "attention_out"):
            yield f"work.{name}", getattr(self.work, name)

    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.named())
