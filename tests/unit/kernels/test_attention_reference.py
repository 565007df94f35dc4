"""The torch specification of `attention` against a softmax written out position by position."""

from __future__ import annotations

import pytest
import torch
from attention_case import AttentionCase, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.kernels import reference_attention
from ostinato.kernels.reference_attention import attention


def assert_exact(out: torch.Tensor, case: AttentionCase) -> None:
    """Up to float32 rounding."""
    torch.testing.assert_close(out.double(), case.expected(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("query_len", [1, 2, 8])
def test_uniform_rows_match_a_dense_softmax(query_len: int) -> None:
    case = make_case([37, 0, 70, 8, 16], [query_len] * 5, num_kv_heads=3, group=3, head_size=80)
    assert_exact(case.run(attention, query_len, device="cpu"), case)


def test_ragged_rows_match_a_dense_softmax_and_padding_is_zero() -> None:
    case = make_case([37, 5, 0, 64, 9], [1, 5, 0, 33, 2], num_kv_heads=2, group=4, head_size=64, num_pad_tokens=7)
    out = case.run(attention, device="cpu")
    assert_exact(out, case)
    assert torch.equal(out[-7:], torch.zeros_like(out[-7:]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    case = make_case([45, 1, 30], [3, 1, 30], num_kv_heads=1, group=4, head_size=96, dtype=dtype)
    torch.testing.assert_close(case.run(attention, device="cpu"), case.expected().to(dtype))


def test_queries_that_see_nothing_are_zero() -> None:
    case = make_case([2, 0, 3], [4, 4, 4], num_kv_heads=1, group=2, head_size=64)
    out = case.run(attention, query_len=4, device="cpu")
    assert_exact(out, case)
    assert not out[:2].any() and out[2:4].any() and not out[4:9].any()


def test_long_prompts_in_chunks_of_queries_equal_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([70, 41, 12], [50, 41, 3], num_kv_heads=2, group=2, head_size=64)
    whole = case.run(attention, device="cpu")
    monkeypatch.setattr(reference_attention, "_MAX_QUERIES_PER_CHUNK", 16)
    torch.testing.assert_close(case.run(attention, device="cpu"), whole)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    alone = make_case([53], [2], num_kv_heads=3, group=3, head_size=64, seed=3)
    beside = make_case([53, 20, 70], [2, 2, 2], num_kv_heads=3, group=3, head_size=64, seed=4)
    beside.q[:2] = alone.q
    slot, other = int(beside.row_slot[0]), int(alone.row_slot[0])
    for column in range(4):
        beside.pool[int(beside.block_table[slot, column])] = alone.pool[int(alone.block_table[other, column])]
    assert torch.equal(beside.run(attention, 2, device="cpu")[:2], alone.run(attention, 2, device="cpu"))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6),
    pad=st.integers(0, 3),
    group=st.sampled_from([1, 3, 4]),
)
def test_any_ragged_batch(rows: list[tuple[int, int]], pad: int, group: int) -> None:
    seq_lens = [before + new for before, new in rows]
    case = make_case(seq_lens, [new for _, new in rows], num_kv_heads=2, group=group, head_size=64, num_pad_tokens=pad)
    assert_exact(case.run(attention, device="cpu"), case)
