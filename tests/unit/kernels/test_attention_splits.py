"""The split count: enough to fill the device, few enough to be worth merging, and never a function of lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.kernels.splits import choose_num_splits

NUM_SMS = 132


def test_one_long_row_is_spread_over_the_device() -> None:
    assert 16 <= choose_num_splits(1, 8, max_blocks=2048, num_sms=NUM_SMS) <= 33


def test_many_rows_fill_the_device_unsplit() -> None:
    assert choose_num_splits(256, 8, max_blocks=2048, num_sms=NUM_SMS) == 1


def test_short_rows_are_not_split() -> None:
    assert choose_num_splits(1, 1, max_blocks=8, num_sms=NUM_SMS) == 1
    assert choose_num_splits(1, 1, max_blocks=1, num_sms=NUM_SMS) == 1


positive = st.integers(1, 4096)


@given(num_rows=positive, num_kv_heads=st.integers(1, 64), max_blocks=positive, num_sms=st.integers(1, 256))
def test_bounds(num_rows: int, num_kv_heads: int, max_blocks: int, num_sms: int) -> None:
    splits = choose_num_splits(num_rows, num_kv_heads, max_blocks, num_sms)
    assert 1 <= splits <= 128
    assert splits == 1 or splits * 8 <= max_blocks
    if num_rows * num_kv_heads >= 2 * num_sms:
        assert splits == 1


@pytest.mark.parametrize("argument", ["num_rows", "num_kv_heads", "max_blocks", "num_sms"])
def test_counts_must_be_positive(argument: str) -> None:
    counts = {"num_rows": 1, "num_kv_heads": 1, "max_blocks": 1, "num_sms": 1, argument: 0}
    with pytest.raises(ValueError, match=f"{argument}=0"):
        choose_num_splits(**counts)
