"""Raw log-probabilities: the reference against log_softmax and sorting, the kernels against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from ops_case import TORCH, TRITON, Implementation, require_triton
from torch import Tensor

UNTOUCHED = 777


@pytest.fixture(params=[TORCH, TRITON], ids=lambda implementation: implementation.name)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    if request.param is TRITON:
        require_triton()
    chosen: Implementation = request.param
    return chosen


def logprobs(
    implementation: Implementation, logits: Tensor, slots: list[int], wanted: list[int], sampled: list[int]
) -> tuple[Tensor, Tensor]:
    values = torch.full((len(slots) + 2, 22), float(UNTOUCHED), device=implementation.device)
    ids = torch.full((len(slots) + 2, 22), UNTOUCHED, dtype=torch.int32, device=implementation.device)
    ints = implementation.ints
    implementation.logprobs(logits.to(implementation.device), ints(*slots), ints(*wanted), ints(*sampled), values, ids)
    return values.cpu(), ids.cpu()


@pytest.mark.parametrize(("num_vocab", "dtype"), [(5, torch.float32), (37, torch.float16), (5000, torch.float16)])
def test_against_log_softmax(implementation: Implementation, num_vocab: int, dtype: torch.dtype) -> None:
    """float16 logits of 5000 tokens tie: lower ids come first."""
    generator = torch.Generator().manual_seed(num_vocab)
    logits = torch.randn(6, num_vocab + 3, generator=generator).to(dtype)[:, :num_vocab]
    slots, wanted, sampled = [2, 0, 4, 1, 3, 2], [3, -1, 0, 20, -1], [0, 4, -1, 2, 3, 1]
    values, ids = logprobs(implementation, logits, slots, wanted, sampled)
    for r, slot in enumerate(slots):
        count = wanted[slot]
        if count < 0 or slot == 4:  # slot 4 is scratch
            assert (values[r] == UNTOUCHED).all() and (ids[r] == UNTOUCHED).all()
            continue
        row, token, count = logits[r].float(), sampled[r], min(count, num_vocab)
        expected = row.log_softmax(0)
        order = sorted(range(num_vocab), key=lambda v: (-float(row[v]), v))[:count]
        assert ids[r].tolist() == [token, 1 + int((row > row[token]).sum()), *order] + [-1] * (20 - count)
        torch.testing.assert_close(
            values[r, :2], torch.stack((expected[token], row.logsumexp(0))), atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(values[r, 2 : 2 + count], expected[order], atol=1e-5, rtol=1e-5)
        assert (values[r, 2 + count :] == -math.inf).all()
    assert (values[6:] == UNTOUCHED).all() and (ids[6:] == UNTOUCHED).all()


def test_banned_and_missing_logits(implementation: Implementation) -> None:
    """-inf and NaN logits come last, with log-probability -inf; a row without any number does not hang."""
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[1.0, nan, -inf, 2.0], [nan] * 4, [-inf, -inf, 0.0, -inf]])
    values, ids = logprobs(implementation, logits, [0, 1, 2], [3, 2, 2, -1], [3, 0, 2])
    assert ids[0, :5].tolist() == [3, 1, 3, 0, 1] and values[0, 4] == -inf
    assert ids[2, :4].tolist() == [2, 1, 2, 0] and values[2, :4].tolist() == [0.0, 0.0, 0.0, -inf]
    assert ids[1, :4].tolist() == [0, 1, 0, 1] and values[1, :4].tolist() == [-inf] * 4
