from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.kv.prefix import HashChain, block_hashes

TOKENS = st.lists(st.integers(0, 3), max_size=40)


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 33])
def test_only_full_blocks_have_a_digest(num_tokens: int) -> None:
    digests = block_hashes(list(range(num_tokens)), 16)
    assert len(digests) == num_tokens // 16
    assert len(set(digests)) == len(digests)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_digests_agree_exactly_where_whole_prefixes_do(a: list[int], b: list[int], block_size: int) -> None:
    for index, (one, other) in enumerate(zip(block_hashes(a, block_size), block_hashes(b, block_size), strict=False)):
        end = (index + 1) * block_size
        assert (one == other) == (a[:end] == b[:end])


@given(TOKENS, st.integers(1, 5), st.lists(st.integers(0, 40), max_size=6))
def test_a_chain_that_grows_equals_one_made_at_once(tokens: list[int], block_size: int, cuts: list[int]) -> None:
    chain = HashChain(block_size)
    for cut in sorted(cuts):
        chain.digests(tokens[:cut])
    assert chain.digests(tokens) == block_hashes(tokens, block_size)


def test_a_parent_continues_and_a_salt_separates() -> None:
    tokens = [3, 1, 4, 1, 5, 9]
    whole = block_hashes(tokens, 2)
    assert block_hashes(tokens[2:], 2, parent=whole[0]) == whole[1:]
    assert not set(block_hashes(tokens, 2, parent=b"salt")) & set(whole)
    assert HashChain(2, b"salt").digests(tokens) == block_hashes(tokens, 2, b"salt")


def test_the_same_block_at_another_place_is_another_block() -> None:
    digests = block_hashes([7, 7, 7, 7, 7, 7], 2)
    assert len(set(digests)) == 3
