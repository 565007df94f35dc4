"""Where each field of the request state and of the host-written step inputs lies in one int32 arena. No torch.

One arena means that every change the host makes, whatever it is, is a list of (offset, value) pairs: one pinned buffer,
one copy, one `scatter`. Nothing is ever half updated, because nothing else writes.

S state rows (the last is the scratch row), M tokens a row, W blocks a row, R batch rows at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ostinato.request import MAX_LOGIT_BIAS, MAX_STOP_IDS


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field. `pad` is what every entry of the scratch row, or of a batch tail, holds; `per` says which it is."""

    name: str
    shape: tuple[int, ...]
    pad: int | float
    per: str  # "slot": one row per running request; "batch": one entry per batch row; "engine": one in all
    offset: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def is_float(self) -> bool:
        return isinstance(self.pad, float)

    @property
    def row_size(self) -> int:
        return prod(self.shape[1:])


class ArenaLayout:
    """Field specs by name, `num_slots` rows counting the scratch row, and the arena's size in int32 words."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, table_width: int, vocab_size: int) -> None:
        self.num_slots = slots = max_num_seqs + 1
        self.scratch = max_num_seqs
        self.max_rows = max_num_seqs
        self.max_model_len = max_model_len
        self.table_width = table_width
        self.size = 0
        self.fields: dict[str, FieldSpec] = {}
        for name in ("num_tokens", "num_computed"):
            self._add(name, (slots,), 0, "slot")
        for name, pad in (("temperature", 0.0), ("top_p", 1.0), ("min_p", 0.0)):
            self._add(name, (slots,), pad, "slot")
        for name, pad in (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)):
            self._add(name, (slots,), pad, "slot")
        for name, integer in (
            ("top_k", 0),
            ("num_logprobs", -1),
            ("seed_lo", 0),
            ("seed_hi", 0),
            ("min_length", 0),
            ("flags", 0),
        ):
            self._add(name, (slots,), integer, "slot")
        self._add("stop_ids", (slots, MAX_STOP_IDS), -1, "slot")
        self._add("bias_ids", (slots, MAX_LOGIT_BIAS), -1, "slot")
        self._add("bias_values", (slots, MAX_LOGIT_BIAS), 0.0, "slot")
        self._add("allowed", (slots, -(-vocab_size // 32)), -1, "slot")
        self._add("step_count", (1,), 0, "engine")
        self._add("row_slot", (max_num_seqs,), self.scratch, "batch")
        self._add("query_start", (max_num_seqs + 1,), 0, "batch")
        self._add("block_table", (slots, table_width), 0, "slot")
        self._add("tokens", (slots, max_model_len), 0, "slot")

    def _add(self, name: str, shape: tuple[int, ...], pad: int | float, per: str) -> None:
        # 16-byte alignment, so that kernels may load any field with wide accesses
        offset = (self.size + 3) // 4 * 4
        self.fields[name] = FieldSpec(name, shape, pad, per, offset)
        self.size = offset + prod(shape)

    def at(self, name: str, row: int = 0, column: int = 0) -> int:
        """Arena offset of one entry."""
        field = self.fields[name]
        return field.offset + row * field.row_size + column
