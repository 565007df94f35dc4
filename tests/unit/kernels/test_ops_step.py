"""prepare, embed, scatter and advance against a loop over rows and tokens, in both implementations."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from ops_case import TORCH, TRITON, Implementation, require_triton
from torch import Tensor

NUM_SLOTS, MAX_LENGTH, TABLE_WIDTH, BLOCK_SIZE, NUM_VOCAB = 6, 22, 5, 4, 13  # tables reach to 20, tokens to 22
SCRATCH = NUM_SLOTS - 1
MAX_TOKENS, MAX_ROWS = 300, 7


@pytest.fixture(params=[TORCH, TRITON], ids=lambda implementation: implementation.name)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    if request.param is TRITON:
        require_triton()
    chosen: Implementation = request.param
    return chosen


@dataclass
class State:
    tokens: Tensor = field(default_factory=lambda: torch.arange(NUM_SLOTS * MAX_LENGTH).view(NUM_SLOTS, -1).int() + 100)
    table: Tensor = field(default_factory=lambda: torch.arange(NUM_SLOTS * TABLE_WIDTH).view(NUM_SLOTS, -1).int() + 1)
    num_tokens: Tensor = field(default_factory=lambda: torch.tensor([6, 1, 20, 22, 9, 0], dtype=torch.int32))
    num_computed: Tensor = field(default_factory=lambda: torch.tensor([5, 0, 18, 21, 3, 0], dtype=torch.int32))
    counts: Tensor = field(default_factory=lambda: torch.ones(NUM_SLOTS, NUM_VOCAB, dtype=torch.int32))


@dataclass(frozen=True)
class Batch:
    slots: list[int]
    lengths: list[int]
    query_len: int

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:r]) for r in range(len(self.lengths) + 1)]


BATCHES = {
    "decode": Batch([2, SCRATCH, 0, 4, SCRATCH], [1] * 5, 1),
    "uniform of 3": Batch([0, 1, 4, 2], [3] * 4, 3),
    "ragged": Batch([1, 0, 4, SCRATCH], [1, 7, 2, 0], 0),
    "ragged, one row without tokens": Batch([1, 0, 4], [2, 0, 3], 0),
    "past the table and the tokens": Batch([2, 3, 0], [5, 2, 1], 0),
    "one long row": Batch([1], [20], 0),
    "no rows": Batch([], [], 0),
}


def step_inputs(implementation: Implementation, batch: Batch) -> tuple[Tensor, Tensor]:
    """row_slot and query_start at full width; what lies beyond the rows is padding, or never read if uniform."""
    slots = batch.slots + [SCRATCH] * (MAX_ROWS - len(batch.slots))
    starts = batch.starts + [batch.starts[-1]] * (MAX_ROWS - len(batch.slots))
    if batch.query_len > 0:
        starts = [-77] * (MAX_ROWS + 1)
    return implementation.ints(*slots), implementation.ints(*starts)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_prepare(implementation: Implementation, batch: Batch) -> None:
    state = State()
    device = implementation.device
    outs = [
        torch.full((size,), 12345, dtype=torch.int32, device=device) for size in (MAX_TOKENS,) * 3 + (MAX_ROWS,) * 2
    ]
    fields = (tensor.to(device) for tensor in (state.num_computed, state.num_tokens, state.tokens, state.table))
    rows = len(batch.slots)
    implementation.prepare(*step_inputs(implementation, batch), *fields, batch.query_len, rows, BLOCK_SIZE, *outs)

    ids, positions, cells = [0] * MAX_TOKENS, [0] * MAX_TOKENS, [-1] * MAX_TOKENS
    seq_lens, logit_index = [0] * MAX_ROWS, [0] * MAX_ROWS
    limit = min(MAX_LENGTH, TABLE_WIDTH * BLOCK_SIZE)
    for r, (slot, length, start) in enumerate(zip(batch.slots, batch.lengths, batch.starts, strict=False)):
        if slot == SCRATCH:
            continue
        computed = int(state.num_computed[slot])
        seq_lens[r], logit_index[r] = min(computed + length, limit), max(start + length - 1, 0)
        for offset in range(length):
            position = computed + offset
            if position < limit:
                ids[start + offset], positions[start + offset] = int(state.tokens[slot, position]), position
                block = int(state.table[slot, position // BLOCK_SIZE])
                cells[start + offset] = block * BLOCK_SIZE + position % BLOCK_SIZE
    assert [out.tolist() for out in outs] == [ids, positions, cells, seq_lens, logit_index]


def test_prepare_finds_the_row_of_each_token_in_a_long_batch(implementation: Implementation) -> None:
    """Rows 0, 2, 4, ... of 0 to 9 tokens: every token's id names its row."""
    num_rows, device = 61, implementation.device
    lengths = [(7 * r) % 10 for r in range(num_rows)]
    starts = [sum(lengths[:r]) for r in range(num_rows + 1)]
    tokens = torch.arange(num_rows + 1, dtype=torch.int32, device=device).repeat_interleave(10).view(-1, 10)
    zeros = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
    table = torch.ones(num_rows + 1, 3, dtype=torch.int32, device=device)
    ids, positions, cells = (torch.full((starts[-1] + 5,), 9, dtype=torch.int32, device=device) for _ in range(3))
    seq_lens, logit_index = (torch.zeros(num_rows, dtype=torch.int32, device=device) for _ in range(2))
    rows = (implementation.ints(*range(num_rows)), implementation.ints(*starts))
    outs = (ids, positions, cells, seq_lens, logit_index)
    implementation.prepare(*rows, zeros, zeros, tokens, table, 0, num_rows, BLOCK_SIZE, *outs)
    assert ids.tolist() == [r for r, length in enumerate(lengths) for _ in range(length)] + [0] * 5
    assert positions.tolist() == [i for length in lengths for i in range(length)] + [0] * 5
    assert seq_lens.tolist() == lengths


@pytest.mark.parametrize("count", [0, 1, 5, 700])
def test_scatter(implementation: Implementation, count: int) -> None:
    offsets = torch.randperm(900, generator=torch.Generator().manual_seed(count)).int()
    patches = torch.stack((offsets, -offsets - 1), 1)
    arena = torch.full((900,), 7, dtype=torch.int32)
    expected = arena.tolist()
    for offset, value in patches[:count].tolist():
        expected[offset] = value
    on_device = arena.to(implementation.device)
    implementation.scatter(on_device, patches.to(implementation.device), count)
    assert on_device.tolist() == expected


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
def test_advance(implementation: Implementation, batch: Batch) -> None:
    """Rows that end their known tokens sample (0 of "decode", for one), the others and full ones do not."""
    state, expected, device = State(), State(), implementation.device
    sampled = [(5 * r + 2) % NUM_VOCAB for r in range(MAX_ROWS)]
    published = [-1] * MAX_ROWS
    for r, (slot, length) in enumerate(zip(batch.slots, batch.lengths, strict=True)):
        if slot == SCRATCH:
            continue
        expected.num_computed[slot] += length
        known = int(expected.num_tokens[slot])
        if expected.num_computed[slot] >= known and known < MAX_LENGTH:
            expected.tokens[slot, known] = sampled[r]
            expected.num_tokens[slot] += 1
            expected.counts[slot, sampled[r]] += 1
            published[r] = sampled[r]

    fields = [tensor.to(device) for tensor in (state.tokens, state.num_tokens, state.num_computed, state.counts)]
    step_count, ring = implementation.ints(7), torch.full((3, MAX_ROWS), 55, dtype=torch.int32, device=device)
    implementation.advance(
        *step_inputs(implementation, batch), implementation.ints(*sampled), batch.query_len, len(batch.slots),
        *fields, step_count, ring,
    )  # fmt: skip
    assert step_count.tolist() == [8]
    assert ring.tolist() == [[55] * MAX_ROWS, published, [55] * MAX_ROWS]
    wanted = (expected.tokens, expected.num_tokens, expected.num_computed, expected.counts)
    for actual, tensor in zip(fields, wanted, strict=True):
        assert torch.equal(actual.cpu(), tensor)


@pytest.mark.parametrize("size", [5, 64, 1500])
def test_embed(implementation: Implementation, size: int) -> None:
    """Rows of more than a block; a view of a wider buffer, of which nothing else is touched."""
    weight = torch.randn(9, size)
    token_ids = torch.tensor([8, 0, 3, 3], dtype=torch.int32)
    wide = torch.full((4, size + 3), -7.0, device=implementation.device)
    implementation.embed(token_ids.to(implementation.device), weight.to(implementation.device), wide[:, :size])
    assert torch.equal(wide[:, :size].cpu(), weight[token_ids.long()])
    assert (wide[:, size:] == -7.0).all()
