"""Device-resident request state: one row per running request for life, plus the scratch row of all padding.

The recorded graph reads it and advances it; the host writes it only through `Patches`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ostinato.kernels import ops
from ostinato.runner.layout import ArenaLayout
from ostinato.sampling.rows import sampling_row
from ostinato.step import Admission, TableAppend, TokenMask


class RequestState:
    """The arena and its named views (see docs/architecture.md), and the two tables that penalties need.

    `output_counts [S, V]` int32 counts each row's sampled tokens and `in_prompt [S, V]` bool marks its prompt's; both
    are reset at the admission of a row that has penalties and read only for such rows.
    """

    def __init__(self, layout: ArenaLayout, vocab_size: int, device: torch.device) -> None:
        self.layout = layout
        self.arena = torch.zeros(layout.size, dtype=torch.int32, device=device)
        self.views = {name: self._view(name) for name in layout.fields}
        for name, field in layout.fields.items():
            self.views[name].fill_(field.pad)
        self.output_counts = torch.zeros((layout.num_slots, vocab_size), dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros((layout.num_slots, vocab_size), dtype=torch.bool, device=device)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.views[name]

    def named_view(self, name: str) -> torch.Tensor:
        """A field of the arena, or one of the two penalty tables."""
        tables = {"output_counts": self.output_counts, "in_prompt": self.in_prompt}
        return tables[name] if name in tables else self.views[name]

    def _view(self, name: str) -> torch.Tensor:
        field = self.layout.fields[name]
        flat = self.arena[field.offset : field.offset + field.size]
        return (flat.view(torch.float32) if field.is_float else flat).view(field.shape)

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "state.arena", self.arena
        yield "state.output_counts", self.output_counts
        yield "state.in_prompt", self.in_prompt

    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.named())

    def reset_penalties(self, admission: Admission) -> None:
        """Counts of an admitted row, from its own tokens in the arena (so after the patches are applied)."""
        slot, num_prompt, known = admission.slot, admission.num_prompt_tokens, len(admission.token_ids)
        tokens = self["tokens"][slot]
        self.in_prompt[slot].zero_()
        self.in_prompt[slot].index_fill_(0, tokens[:num_prompt].long(), True)
        self.output_counts[slot].zero_()
        outputs = tokens[num_prompt:known].long()
        self.output_counts[slot].index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))


class Patches:
    """The host's changes to the arena, gathered as (offset, value) pairs and applied in one copy and one `scatter`.

    On CUDA the pairs go through `depth` pinned buffers in turn; a buffer is written again only after the copy that read
    it has finished, which the event recorded behind that copy tells.
    """

    def __init__(self, state: RequestState, *, capacity: int, depth: int) -> None:
        device = state.arena.device
        cuda = device.type == "cuda"
        self._state = state
        self._layout = state.layout
        self._capacity = capacity
        self._host = [torch.zeros((capacity, 2), dtype=torch.int32, pin_memory=cuda) for _ in range(depth)]
        self._arrays = [tensor.numpy() for tensor in self._host]
        self._device = torch.zeros((capacity, 2), dtype=torch.int32, device=device) if cuda else None
        self._events = [torch.cuda.Event() if cuda else None for _ in range(depth)]
        self._turn = 0
        self._count = 0
        self._open = False
        self._masks: dict[int, np.ndarray] = {}  # by state row: the words that the device has

    def put(self, offset: int, value: int) -> None:
        pairs = self._room(1)
        pairs[self._count] = offset, value
        self._count += 1

    def put_run(self, offset: int, values: Sequence[int] | np.ndarray) -> None:
        """Consecutive entries from `offset` on, in as many pieces as the buffer needs."""
        data = np.asarray(values, dtype=np.int32)
        begin = 0
        while begin < len(data):
            pairs = self._room(1)
            size = min(len(data) - begin, self._capacity - self._count)
            rows = slice(self._count, self._count + size)
            pairs[rows, 0] = np.arange(offset + begin, offset + begin + size, dtype=np.int32)
            pairs[rows, 1] = data[begin : begin + size]
            self._count += size
            begin += size

    def put_floats(self, offset: int, values: Sequence[float]) -> None:
        self.put_run(offset, np.asarray(values, dtype=np.float32).view(np.int32))

    def put_changes(self, offset: int, old: np.ndarray, new: np.ndarray) -> None:
        """The entries in which `new` differs from `old` (int32, one dimension, at most the capacity)."""
        changed = np.nonzero(old != new)[0]
        if not len(changed):
            return
        pairs = self._room(len(changed))
        rows = slice(self._count, self._count + len(changed))
        pairs[rows, 0] = changed + offset
        pairs[rows, 1] = new[changed]
        self._count += len(changed)

    def admit(self, admission: Admission) -> bool:
        """Everything a row needs to begin. Returns whether the row has penalties, whose tables must be reset after."""
        layout, slot = self._layout, admission.slot
        row = sampling_row(
            admission.params,
            num_prompt_tokens=admission.num_prompt_tokens,
            stop_token_ids=tuple(admission.stop_token_ids),
            seed=admission.seed,
        )
        self.put_run(layout.at("tokens", slot), admission.token_ids)
        self.put_run(layout.at("block_table", slot), admission.block_ids)
        self.put(layout.at("num_tokens", slot), len(admission.token_ids))
        self.put(layout.at("num_computed", slot), admission.num_computed)
        for name, integer in row.ints.items():
            self.put(layout.at(name, slot), integer)
        for name, number in row.floats.items():
            self.put_floats(layout.at(name, slot), (number,))
        if row.stop_ids and admission.params.min_tokens:
            self.put_run(layout.at("stop_ids", slot), _padded(row.stop_ids, layout.fields["stop_ids"].row_size, -1))
        if row.bias_ids:
            width = layout.fields["bias_ids"].row_size
            self.put_run(layout.at("bias_ids", slot), _padded(row.bias_ids, width, -1))
            self.put_floats(layout.at("bias_values", slot), _padded(row.bias_values, width, 0.0))
        return row.has_penalties

    def mask(self, mask: TokenMask) -> None:
        """The tokens that a row may draw: what differs from its last mask, which between tokens of a text is little."""
        words = np.frombuffer(mask.words, dtype=np.int32)
        offset, sent = self._layout.at("allowed", mask.slot), self._masks.get(mask.slot)
        if sent is None:
            self.put_run(offset, words)
        else:
            self.put_changes(offset, sent, words)
        self._masks[mask.slot] = words

    def clear(self) -> None:
        """Forgets what was gathered and not applied."""
        self._count = 0
        self._masks.clear()

    def append(self, append: TableAppend) -> None:
        self.put_run(self._layout.at("block_table", append.slot, append.column), append.block_ids)

    def apply(self) -> int:
        """Sends what was gathered; returns how many entries changed. Does nothing at all when none did."""
        count = self._count
        if count == 0:
            return 0
        host = self._host[self._turn]
        if self._device is None:
            ops.scatter(self._state.arena, host, count)
        else:
            self._device[:count].copy_(host[:count], non_blocking=True)
            event = self._events[self._turn]
            assert event is not None
            event.record()
            ops.scatter(self._state.arena, self._device, count)
        self._turn = (self._turn + 1) % len(self._host)
        self._count = 0
        self._open = False
        return count

    def _room(self, size: int) -> np.ndarray:
        if self._count + size > self._capacity:
            self.apply()
        if not self._open:
            event = self._events[self._turn]
            if event is not None:
                event.synchronize()
            self._open = True
        return self._arrays[self._turn]


def _padded(values: Sequence[int] | Sequence[float], width: int, pad: int | float) -> list[Any]:
    return [*values, *[pad] * (width - len(values))]
