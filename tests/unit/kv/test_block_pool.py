from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.errors import CapacityError, ConfigError, OstinatoError
from ostinato.kv.block_pool import SCRATCH_BLOCK, BlockPool


def test_hands_out_every_block_but_scratch() -> None:
    pool = BlockPool(7)
    blocks = pool.allocate(6)
    assert sorted(blocks) == [1, 2, 3, 4, 5, 6]
    assert SCRATCH_BLOCK not in blocks
    assert pool.num_free == 0
    with pytest.raises(CapacityError, match="1 KV blocks wanted, 0 of 6 are free"):
        pool.allocate(1)


def test_a_refused_allocation_takes_nothing() -> None:
    pool = BlockPool(5)
    pool.allocate(1)
    with pytest.raises(CapacityError):
        pool.allocate(4)
    assert pool.num_free == 3
    pool.check_integrity()


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_needs_a_block_beside_scratch(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=f"num_blocks={num_blocks}"):
        BlockPool(num_blocks)


def test_unhashed_blocks_are_reused_before_hashed_ones_and_those_oldest_first() -> None:
    pool = BlockPool(6)
    a, b, c, d, e = pool.allocate(5)
    for block_id in (a, b, c):
        pool.register(block_id, bytes([block_id]))
    pool.free([b, d, a, e, c])
    assert sorted(pool.allocate(2)) == sorted([d, e])
    assert pool.allocate(3) == [b, a, c]
    assert pool.num_cached == 0


def test_content_survives_a_free_until_reuse() -> None:
    pool = BlockPool(4)
    (block_id,) = pool.allocate(1)
    pool.register(block_id, b"x")
    pool.free([block_id])
    assert pool.lookup(b"x") == block_id
    assert pool.num_taken_by([block_id]) == 1
    pool.touch([block_id])
    assert (pool.num_refs(block_id), pool.num_free, pool.num_taken_by([block_id])) == (1, 2, 0)
    pool.free([block_id])
    pool.allocate(3)
    assert pool.lookup(b"x") is None


def test_a_shared_block_is_free_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(4)
    (block_id,) = pool.allocate(1)
    pool.register(block_id, b"x")
    pool.touch([block_id, block_id])
    assert pool.num_freed_by([block_id, block_id]) == 0
    assert pool.num_freed_by([block_id] * 3) == 1
    pool.free([block_id, block_id])
    assert pool.num_free == 2
    pool.free([block_id])
    assert pool.num_free == 3


def test_the_first_block_with_a_content_keeps_it() -> None:
    pool = BlockPool(4)
    first, twin, _ = pool.allocate(3)
    pool.register(first, b"x")
    pool.register(twin, b"x")
    pool.register(first, b"y")
    assert pool.lookup(b"x") == first and pool.lookup(b"y") is None
    pool.free([first, twin])
    pool.check_integrity([[3]])


def test_forget_contents() -> None:
    pool = BlockPool(5)
    free, held, _, _ = pool.allocate(4)
    pool.register(free, b"x")
    pool.register(held, b"y")
    pool.free([free])
    pool.forget_contents()
    assert pool.lookup(b"x") is None and pool.lookup(b"y") is None
    assert pool.num_free == 1 and pool.num_cached == 0
    pool.check_integrity()


def test_our_own_mistakes_are_caught() -> None:
    pool = BlockPool(4)
    (block_id,) = pool.allocate(1)
    pool.free([block_id])
    with pytest.raises(AssertionError, match=f"KV block {block_id} was freed more often"):
        pool.free([block_id])
    with pytest.raises(AssertionError, match="not held"):
        pool.register(block_id, b"x")


def test_check_integrity_finds_a_leak() -> None:
    pool = BlockPool(5)
    table = pool.allocate(3)
    pool.check_integrity([table])
    with pytest.raises(OstinatoError, match="has 1 references, 0 of them accounted for"):
        pool.check_integrity([table[:2]])


@given(st.integers(2, 9), st.lists(st.tuples(st.sampled_from("afrtx"), st.integers(0, 5)), max_size=60))
def test_any_sequence_of_calls_keeps_the_books(num_blocks: int, calls: list[tuple[str, int]]) -> None:
    pool = BlockPool(num_blocks)
    held: list[int] = []
    for call, number in calls:
        digest = bytes([number])
        if call == "a" and number <= pool.num_free:
            new = pool.allocate(number)
            assert not set(new) & set(held) and SCRATCH_BLOCK not in new
            held += new
        elif call == "f" and held:
            pool.free([held.pop(number % len(held))])
        elif call == "r" and held:
            pool.register(held[number % len(held)], digest)
        elif call == "t" and (block_id := pool.lookup(digest)) is not None:
            pool.touch([block_id])
            held.append(block_id)
        elif call == "x":
            pool.forget_contents()
        pool.check_integrity([held])
        assert pool.num_free == num_blocks - 1 - len(set(held))


def test_resize_keeps_what_stays_and_forgets_what_goes() -> None:
    pool = BlockPool(6)
    assert pool.allocate(3) == [1, 2, 3]
    pool.register(2, b"two")
    pool.register(3, b"three")
    pool.free([3, 2])
    pool.resize(3)
    pool.check_integrity([[1]])
    assert (pool.lookup(b"two"), pool.lookup(b"three")) == (2, None)
    assert (pool.num_allocatable, pool.num_free) == (2, 1)
    pool.resize(6)
    pool.check_integrity([[1]])
    assert pool.lookup(b"three") is None, "block 3 has another memory behind it now"
    assert sorted(pool.allocate(4)) == [2, 3, 4, 5]


def test_a_block_that_is_held_cannot_go() -> None:
    pool = BlockPool(6)
    pool.allocate(3)
    with pytest.raises(OstinatoError, match=r"\[3\] are in use"):
        pool.resize(3)
    with pytest.raises(ConfigError, match="at least 2"):
        pool.resize(1)
    assert pool.num_allocatable == 5
    pool.check_integrity([[1, 2, 3]])
