"""The list of parts: every token of every decoding row once, no more parts than there is room for."""

from __future__ import annotations

import pytest
import torch
from attention_case import DEVICE
from hypothesis import given
from hypothesis import strategies as st

from ostinato.kernels import reference_attention
from ostinato.kernels.splits import PART_UNIT, decode_places, extra_parts

NUM_SMS = 132


def plan(
    seq_lens: list[int], num_tokens: list[int] | None, num_kv_heads: int, places: int, num_extra: int
) -> tuple[int, list[tuple[int, int]]]:
    """Tokens of a part, and (row, index) of each."""
    lens, start, query_len, parts = inputs(seq_lens, num_tokens, num_extra)
    reference_attention.plan_parts(lens, start, query_len, len(seq_lens), num_kv_heads, places, parts)
    listed = [entry for entry in parts[1:].tolist() if entry >= 0]
    assert parts[len(listed) + 1 :].eq(-1).all()
    return int(parts[0]), [(entry & 0xFFFF, entry >> 16) for entry in listed]


def inputs(
    seq_lens: list[int], num_tokens: list[int] | None, num_extra: int
) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    each = torch.tensor([0, *(num_tokens or [1] * len(seq_lens))])
    start, parts = each.cumsum(0).int(), torch.full((1 + len(seq_lens) + num_extra,), 2**30, dtype=torch.int32)
    return torch.tensor(seq_lens, dtype=torch.int32), start, 1 if num_tokens is None else 0, parts


rows = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 3)), min_size=1, max_size=40)


@given(rows, st.booleans(), st.integers(1, 16), st.integers(1, 600), st.integers(1, 300))
def test_every_row_is_covered_once(
    rows: list[tuple[int, int]], ragged: bool, num_kv_heads: int, places: int, num_extra: int
) -> None:
    seq_lens, num_tokens = [length for length, _ in rows], [count for _, count in rows]
    share, listed = plan(seq_lens, num_tokens if ragged else None, num_kv_heads, places, num_extra)
    assert share % PART_UNIT == 0 and share > 0
    expected = [
        (row, index)
        for row, length in enumerate(seq_lens)
        if not ragged or num_tokens[row] == 1
        for index in range(max(-(-length // share), 1))
    ]
    assert listed == expected


def test_alike_rows_that_all_have_a_place_stay_whole() -> None:
    places, extra = decode_places(NUM_SMS), extra_parts(8, NUM_SMS)
    assert len(plan([1000 + index for index in range(64)], None, 8, places, extra)[1]) == 64


def test_no_part_is_much_of_what_a_place_has_to_do() -> None:
    """Lengths of 200 to 2000: without parts the longest row is all that a place should have."""
    places, extra = decode_places(NUM_SMS), extra_parts(8, NUM_SMS)
    seq_lens = [200 + 1800 * index // 129 for index in range(130)]
    share, listed = plan(seq_lens, None, 8, places, extra)
    assert share <= 0.4 * sum(seq_lens) * 8 / places
    assert len(listed) <= 130 + extra


def test_few_long_rows_beside_prompts_keep_the_device_busy() -> None:
    places, extra = decode_places(NUM_SMS), extra_parts(8, NUM_SMS)
    seq_lens, num_tokens = [30_000] * 3 + [500] * 61, [1] * 3 + [500] + [0] * 60
    _, listed = plan(seq_lens, num_tokens, 8, places, extra)
    assert {row for row, _ in listed} == {0, 1, 2} and len(listed) * 8 > places


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_the_kernel_lists_the_same(num_rows: int, ragged: bool) -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported without its interpreter and there is no GPU")
    from ostinato.kernels.triton_decode_split import plan_parts

    generator = torch.Generator().manual_seed(num_rows)
    for most, num_extra in ((100, 1), (3000, 7), (3000, 198)):
        seq_lens = torch.randint(0, most, (num_rows,), generator=generator).tolist()
        num_tokens = torch.randint(0, 3, (num_rows,), generator=generator).tolist()
        args = inputs(seq_lens, num_tokens if ragged else None, num_extra)
        ours = [arg.to(DEVICE) if isinstance(arg, torch.Tensor) else arg for arg in args]
        for call, (lens, start, query_len, parts) in ((reference_attention.plan_parts, args), (plan_parts, ours)):
            call(lens, start, query_len, num_rows, 8, 528, parts)
        assert torch.equal(ours[3].cpu(), args[3])
