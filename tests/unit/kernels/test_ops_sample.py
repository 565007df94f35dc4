"""The sampler's reference against its definition: filters, penalties, order, edge cases, and statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_case import TORCH, TRITON, Implementation, draw, require_triton, sampling_state

from ostinato.kernels.reference_sampling import (
    FLAG_ALLOWED,
    FLAG_LOGIT_BIAS,
    FLAG_MIN_LENGTH,
    FLAG_PENALTIES,
    least_logit,
)

INF, NAN = math.inf, math.nan


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chi_square(counts: np.ndarray, shares: np.ndarray) -> float:
    """Pearson's statistic over its degrees of freedom: about 1 if `counts` were drawn with `shares`."""
    expected = counts.sum() * shares
    return float(((counts - expected) ** 2 / expected).sum() / (shares.size - 1))


def test_greedy_takes_the_lowest_of_equals_and_pads() -> None:
    logits = torch.tensor([[1.0, 3, 3, 0], [9, 1, 9, 9], [0, 0, 0, 1], [5, 5, 5, 5]])
    state = sampling_state(5, 4)
    assert draw(TORCH, logits, [0, 3, 4, 1], state, max_rows=6)[0] == [1, 0, -1, 0, -1, -1]


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1.0])
def test_rows_without_numbers_end_with_a_valid_id(temperature: float) -> None:
    logits = torch.tensor([[NAN] * 3, [-INF] * 3, [NAN, -INF, 2], [NAN, INF, INF], [-INF, NAN, NAN]])
    state = sampling_state(6, 3, temperature=[temperature] * 5, top_p=[0.9] * 5, top_k=[2] * 5, min_p=[0.1] * 5)
    assert draw(TORCH, logits, [0, 1, 2, 3, 4], state)[0] == [0, 0, 2, 1, 0]


def test_penalties_follow_the_documented_order() -> None:
    """Bias, then repetition on what it gives, then frequency and presence; the ban of stop ids wins over all."""
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, 0.25, 7.0]] * 3)
    state = sampling_state(4, 6, flags=[0, FLAG_PENALTIES | FLAG_LOGIT_BIAS | FLAG_MIN_LENGTH, FLAG_PENALTIES])
    state.repetition_penalty[:], state.frequency_penalty[:], state.presence_penalty[:] = 2.0, 0.5, 0.25
    state.output_counts[:, 0], state.output_counts[:, 1] = 3, 1
    state.in_prompt[:, 2] = True
    state.bias_ids[:, :3], state.bias_values[:, :3] = torch.tensor([1, 5, 99]), torch.tensor([4.0, -1.0, 8.0])
    state.stop_ids[:, :2], state.min_length[:] = torch.tensor([5, 77]), 1000
    tokens, adjusted = draw(TORCH, logits, [0, 1, 2], state)
    assert tokens == [5, 2, 5]
    assert adjusted[0].isnan().all(), "a row without flags is never copied"
    assert adjusted[1].tolist() == [2 / 2 - 1.5 - 0.25, (-2 + 4) / 2 - 0.5 - 0.25, 0.5, 0.5, 0.25, -INF]
    assert adjusted[2].tolist() == [2 / 2 - 1.5 - 0.25, -2 * 2 - 0.5 - 0.25, 0.5, 0.5, 0.25, 7.0]


def test_stop_ids_are_allowed_from_min_length_on() -> None:
    state = sampling_state(4, 3, flags=[FLAG_MIN_LENGTH] * 3, min_length=[8, 8, 8], num_tokens=[7, 8, 9])
    state.stop_ids[:, 63] = 1
    assert draw(TORCH, torch.tensor([[0.0, 5, 1]] * 3), [0, 1, 2], state)[0] == [2, 1, 1]


@pytest.mark.parametrize("implementation", [TORCH, TRITON], ids=lambda implementation: implementation.name)
@pytest.mark.parametrize("num_vocab", [5, 64, 4100])
def test_only_allowed_tokens_are_drawn(implementation: Implementation, num_vocab: int) -> None:
    """Greedy, drawn and filtered rows; penalties and bias bring nothing back; rows without the flag are not asked."""
    if implementation is TRITON:
        require_triton()
    allowed = [{1, 3}, {num_vocab - 1}, {0, 2, num_vocab - 1}, {2}, set()]
    temperatures, flags = [0.0, 1.0, 1.0, 0.0, 0.0], [FLAG_ALLOWED, FLAG_ALLOWED, FLAG_ALLOWED, 15, 0]
    state = sampling_state(6, num_vocab, temperature=temperatures, flags=flags, top_p=[1.0, 1.0, 0.9, 1.0, 1.0])
    state.allowed.zero_()
    for slot, tokens in enumerate(allowed):
        for token in tokens:
            word, bit = divmod(token, 32)
            state.allowed[slot, word] |= 1 << bit if bit < 31 else -(1 << 31)
    state.bias_ids[:, 0], state.bias_values[:, 0] = 4, 50.0
    logits = torch.randn((5, num_vocab), generator=torch.Generator().manual_seed(num_vocab))
    logits[4, 0] = 90.0
    drawn, adjusted = draw(implementation, logits, [0, 1, 2, 3, 4], state)
    assert all(token in tokens for token, tokens in zip(drawn[:4], allowed, strict=False)) and drawn[4] == 0
    for slot in range(4):
        rest = [token for token in range(num_vocab) if token not in allowed[slot]]
        assert (adjusted[slot, rest] == -INF).all()


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-6, 6), min_size=1, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_filters_are_their_definitions(logits: list[int], top_k: int, top_p: float, min_p: float) -> None:
    """Against sorting and summing in float64, except where that is within rounding of a tie."""
    row = np.array(logits, np.float32) / 2
    weights = np.exp(row.astype(np.float64))
    kept = weights >= min_p * weights.max()
    if 0 < top_k < row.size:
        kept &= row >= np.sort(row)[-top_k]
    if np.any(np.abs(weights / weights.max() - min_p) < 1e-5):
        return
    if top_p < 1:
        order = np.argsort(-row, kind="stable")
        order = order[kept[order]]
        share = weights[order].cumsum() / weights[kept].sum()
        if np.any(np.abs(share - top_p) < 1e-5):
            return
        kept &= row >= row[order[np.searchsorted(share, top_p)]]
    assert np.array_equal(row >= least_logit(row, top_k, top_p, min_p), kept)


def test_filters_restrict_the_draw_and_share_one_seed() -> None:
    logits = normal(1, 50).repeat(300, 1)
    state = sampling_state(301, 50, temperature=[0.8] * 300, top_k=[3] * 100 + [0] * 200)
    state.top_p[100:200], state.min_p[200:300] = 0.3, 0.6
    tokens, _ = draw(TORCH, logits, list(range(300)), state)
    order = logits[0].argsort(descending=True).tolist()
    shares = (logits[0] / 0.8).softmax(0)[order]
    num_top_p = int((shares.cumsum(0) < 0.3).sum()) + 1
    num_min_p = int((shares >= 0.6 * shares[0]).sum())
    for part, allowed in ((tokens[:100], 3), (tokens[100:200], num_top_p), (tokens[200:], num_min_p)):
        assert set(part) == set(order[:allowed])


def test_a_draw_depends_on_seed_length_and_logits_only() -> None:
    """Alone, in a batch, in another place of it, in another state row: the same token."""
    logits, num_vocab = normal(6, 4099), 4099
    state = sampling_state(9, num_vocab, temperature=[1.0] * 8, top_p=[1.0, 0.9] * 4)
    together, _ = draw(TORCH, logits, [5, 1, 2, 0, 7, 3], state)
    for r, slot in enumerate([5, 1, 2, 0, 7, 3]):
        assert draw(TORCH, logits[r : r + 1], [slot], state, max_rows=3)[0] == [together[r], -1, -1]
    mixed = [8, 3, 7, 8, 0, 2, 1, 5]
    padding = normal(1, num_vocab, seed=1)
    again, _ = draw(TORCH, torch.cat((padding, logits.flip(0)[:2], padding, logits.flip(0)[2:])), mixed, state)
    assert [token for token in again if token >= 0] == together[::-1]
    state.num_tokens.add_(1)
    assert draw(TORCH, logits, [5, 1, 2, 0, 7, 3], state)[0] != together


@pytest.mark.parametrize("vary", ["seed_lo", "seed_hi", "num_tokens"])
def test_draws_have_the_softmax_distribution(vary: str) -> None:
    """2000 draws of eight tokens; for 7 degrees of freedom the statistic exceeds 3.5 with probability 0.001."""
    num_draws, logits = 2000, torch.tensor([0.0, 1.5, -1.0, 0.7, 2.0, -0.3, 0.1, 1.1])
    state = sampling_state(num_draws + 1, 8, temperature=torch.full((num_draws,), 0.7))
    state.seed_lo.fill_(12), state.seed_hi.fill_(-3), state.num_tokens.fill_(40)
    getattr(state, vary).copy_(torch.arange(num_draws + 1))
    tokens, _ = draw(TORCH, logits.repeat(num_draws, 1), list(range(num_draws)), state)
    shares = (logits / 0.7).double().softmax(0).numpy()
    assert chi_square(np.bincount(tokens, minlength=8), shares) < 3.5


def test_equal_logits_are_drawn_evenly_over_lanes_and_chunks() -> None:
    """Token ids share Philox counters in fours: no lane or chunk may be favoured. 10 groups; 3.1 has p = 0.001."""
    num_draws, num_vocab, lane = 800, 2 * 4096 + 2 * 1024, 1024
    state = sampling_state(num_draws + 1, num_vocab, temperature=torch.ones(num_draws))
    tokens, _ = draw(TORCH, torch.zeros(num_draws, num_vocab), list(range(num_draws)), state)
    counts = np.bincount(np.array(tokens) // lane, minlength=10)
    assert chi_square(counts, np.full(10, 0.1)) < 3.1
    assert len(set(tokens)) > 0.9 * num_draws


def test_the_shape_of_the_sampled_row_may_be_strided_and_sixteen_bit() -> None:
    wide = normal(5, 70).bfloat16()
    state = sampling_state(6, 61, temperature=[0.0, 0.9, 0.0, 0.9, 0.9])
    slots = [0, 1, 2, 3, 4]
    assert draw(TORCH, wide[:, :61], slots, state)[0] == draw(TORCH, wide[:, :61].float().contiguous(), slots, state)[0]
