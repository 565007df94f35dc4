from __future__ import annotations

from ostinato.connectors.host_index import HostIndex


def name(number: int) -> bytes:
    return number.to_bytes(4, "little")


def test_the_longest_unused_goes_first() -> None:
    index = HostIndex(3)
    slots = [index.add(name(number)) for number in range(3)]
    assert sorted(slot for slot in slots if slot is not None) == [0, 1, 2]
    assert index.add(name(1)) is None, "it is here"
    assert index.find([name(0), name(1), name(9), name(2)]) == slots[:2]
    assert index.add(name(3)) == slots[2]
    assert name(2) not in index
    assert len(index) == 3


def test_a_held_slot_keeps_its_block_and_a_full_house_takes_nobody() -> None:
    index = HostIndex(2)
    first, second = index.add(name(0)), index.add(name(1))
    assert first is not None and second is not None
    index.hold([first, first, second])
    assert index.add(name(2)) is None
    index.release([second])
    assert index.add(name(2)) == second
    index.release([first])
    assert index.add(name(3)) == second, "the first is held once more"
    index.release([first])
    assert index.add(name(4)) == first


def test_what_is_forgotten_while_it_is_held_is_used_again_only_afterwards() -> None:
    index = HostIndex(2)
    first, second = index.add(name(0)), index.add(name(1))
    assert first is not None and second is not None
    index.hold([first])
    index.clear()
    assert len(index) == 0
    assert index.add(name(2)) == second
    assert index.add(name(3)) == second
    index.release([first])
    assert index.add(name(4)) == first


def test_a_reserved_slot_is_found_once_it_has_a_name() -> None:
    index = HostIndex(2)
    slot = index.reserve()
    assert slot is not None
    assert len(index) == 0
    assert index.name(slot, name(0)) == slot
    assert index.find([name(0)]) == [slot]
    other = index.reserve()
    assert other is not None and index.reserve() is None, "both are held"
    assert index.name(other, name(0)) == slot, "it is here already, and now held twice"
    index.release([slot])
    assert index.add(name(1)) == other
    assert index.add(name(2)) == other, "the first is still held"
    index.release([slot])
    assert index.add(name(3)) == slot


def test_a_reserved_slot_that_gets_no_name_is_free_again() -> None:
    index = HostIndex(1)
    slot = index.reserve()
    assert slot is not None
    index.clear()
    assert index.add(name(0)) is None
    index.release([slot])
    assert index.add(name(0)) == slot
