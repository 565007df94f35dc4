"""The sampling kernels against the reference: equal tokens, equal adjusted logits, equal thresholds."""

from __future__ import annotations

import math

import pytest
import torch
from ops_case import TORCH, TRITON, draw, require_triton, sampling_state

from ostinato.kernels import ops
from ostinato.kernels.reference_sampling import least_logit

SLOTS = [3, 0, 9, 1, 2, 4, 5, 6, 0, 8, 7]  # 9 is scratch; one slot serves two rows


@pytest.fixture(autouse=True)
def _triton() -> None:
    require_triton()


def mixed_state(num_vocab: int, seed: int) -> ops.SamplingState:
    """Nine rows, each with other settings: greedy, plain draws, filters alone and together, penalties, bias, bans."""
    generator = torch.Generator().manual_seed(seed)
    state = sampling_state(
        10,
        num_vocab,
        temperature=[0.0, 1.0, 0.7, 1.3, 1.0, 0.9, 0.0, 0.0, 1.0],
        top_k=[0, 0, 3, num_vocab // 2, 0, 0, 0, 5, num_vocab],
        top_p=[1.0, 1.0, 1.0, 0.8, 0.5, 1.0, 1.0, 0.1, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.05, 0.3, 0.0, 0.0, 0.0],
        flags=[0, 1, 0, 0, 0, 7, 7, 2, 4],
        min_length=[0, 0, 0, 0, 0, 0, 1000, 0, 1000],
        num_tokens=torch.randint(1, 5000, (9,), generator=generator),
        repetition_penalty=[1.3] * 9,
        presence_penalty=[0.5] * 9,
        frequency_penalty=[-0.25] * 9,
        output_counts=torch.randint(0, 3, (9, num_vocab), generator=generator),
        in_prompt=torch.rand(9, num_vocab, generator=generator) > 0.5,
    )
    state.bias_ids[:, :4] = torch.tensor([1, 2, 0, num_vocab - 1])
    state.bias_values[:, :4] = torch.tensor([3.0, 50.0, 49.0, -2.0])
    state.stop_ids[:, :2] = torch.tensor([2, num_vocab + 3])
    return state


@pytest.mark.parametrize(
    ("num_vocab", "dtype"), [(5, torch.float32), (37, torch.float16), (5000, torch.float32), (5000, torch.float16)]
)
def test_settings_mixed_per_row(num_vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_vocab)
    logits = (2 * torch.randn(len(SLOTS), num_vocab + 3, generator=generator)).to(dtype)[:, :num_vocab]
    state = mixed_state(num_vocab, seed=num_vocab)
    expected, expected_adjusted = draw(TORCH, logits, SLOTS, state, max_rows=13)
    tokens, adjusted = draw(TRITON, logits, SLOTS, state, max_rows=13)
    assert tokens == expected
    assert tokens[2] == -1 and tokens[11:] == [-1, -1] and min(tokens[:2] + tokens[3:11]) >= 0
    assert torch.equal(adjusted.isnan(), expected_adjusted.isnan())
    torch.testing.assert_close(adjusted, expected_adjusted, equal_nan=True, atol=1e-6, rtol=1e-6)


def test_rows_without_numbers_end_with_a_valid_id() -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[nan] * 3, [-inf] * 3, [nan, -inf, 2], [nan, inf, inf], [-1e38, -inf, 3e38]])
    for temperature in (0.0, 1.0):
        state = sampling_state(6, 3, temperature=[temperature] * 5, top_p=[0.9] * 5, top_k=[2] * 5, min_p=[0.1] * 5)
        assert draw(TRITON, logits, [0, 1, 2, 3, 4], state)[0] == [0, 0, 2, 1, 2]
    plain = sampling_state(6, 3, temperature=[1.0] * 5)
    assert draw(TRITON, logits, [0, 1, 2, 3, 4], plain)[0] == [0, 0, 2, 1, 2]


def test_ties_across_chunks_take_the_lowest_id() -> None:
    logits = torch.zeros(3, 9000)
    logits[0, [8999, 5000, 1030, 1029]] = 1.0
    logits[1, [8191, 8192]] = 1.0
    assert draw(TRITON, logits, [0, 1, 2], sampling_state(4, 9000))[0] == [1029, 8191, 0]


def test_thresholds_are_exact() -> None:
    """Straight at the bisection, on rounded logits that tie a lot and on others that do not."""
    from sampling_probes import least_kept_kernel

    settings = [(1, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (700, 0.4, 0.0), (0, 1.0, 0.02), (40, 0.95, 0.01)]
    generator = torch.Generator().manual_seed(3)
    for num_vocab, step in ((37, 0.25), (5000, 0.125), (5000, 2.0**-20)):
        logits = (3 * torch.randn(len(settings), num_vocab, generator=generator) / step).round() * step
        top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings, strict=True))
        out = torch.zeros(len(settings), device=TRITON.device)
        moved = [x.to(TRITON.device) for x in (logits.max(-1).values, top_k.int(), top_p, min_p)]
        least_kept_kernel[(len(settings),)](logits.to(TRITON.device), num_vocab, *moved, out)
        for r, (row, (k, p, least)) in enumerate(zip(logits.numpy(), settings, strict=True)):
            kept = row >= float(out[r])
            assert kept.tolist() == (row >= least_logit(row, k, p, least)).tolist(), (num_vocab, step, settings[r])
