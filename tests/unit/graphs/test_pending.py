from __future__ import annotations

from ostinato.graphs.dispatch import BatchKey, Dispatcher
from ostinato.graphs.mode import CUDAGraphMode, RuntimeMode
from ostinato.graphs.pending import PendingKeys, first_keys

FULL, PIECEWISE = RuntimeMode.FULL, RuntimeMode.PIECEWISE


def decode(rows: int) -> tuple[RuntimeMode, BatchKey]:
    return FULL, BatchKey(rows, rows, 1)


def mixed(tokens: int) -> tuple[RuntimeMode, BatchKey]:
    return PIECEWISE, BatchKey(tokens, 8, None)


KEYS = Dispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, [1, 2, 4, 8], [8, 16, 64], 8).keys()


def test_the_largest_and_the_smallest_of_each_mode_come_first() -> None:
    assert first_keys(KEYS, 1) == [mixed(64), mixed(8), decode(8), decode(1)]
    assert first_keys(KEYS, 2) == [mixed(64), mixed(16), mixed(8), decode(8), decode(2), decode(1)]
    assert first_keys(KEYS, 99) == KEYS
    assert first_keys([], 1) == []


def test_on_demand_nothing_is_due_until_it_is_asked_for() -> None:
    pending = PendingKeys([decode(4), decode(2), mixed(16)], on_demand=True)
    assert pending.due() is None
    pending.ask(*decode(8))  # recorded: not pending
    assert pending.due() is None
    pending.ask(*decode(4))
    pending.ask(*mixed(16))
    pending.ask(*mixed(16))
    assert pending.due() == mixed(16)
    pending.done(mixed(16))
    assert pending.due() == decode(4)
    pending.done(decode(4))
    assert pending.due() is None
    assert list(pending) == [decode(2)]


def test_in_the_background_all_are_due_the_wanted_first_then_the_smallest() -> None:
    pending = PendingKeys([mixed(16), decode(4), decode(2)], on_demand=False)
    assert pending.due() == decode(2)
    pending.ask(*mixed(16))
    assert pending.due() == mixed(16)
    pending.done(mixed(16))
    pending.ask(*decode(4))
    pending.ask(*decode(2))
    assert pending.due() == decode(2), "of equals the smallest"
    pending.done(decode(2))
    pending.done(decode(4))
    assert pending.due() is None
    assert len(pending) == 0
