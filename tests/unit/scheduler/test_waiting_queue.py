from __future__ import annotations

import pytest
from fake_runner import make_request
from hypothesis import given
from hypothesis import strategies as st

from ostinato.request import Request
from ostinato.scheduler.queue import WaitingQueue, order


def request_of(index: int, priority: int) -> Request:
    request = make_request(f"r{index}", [1], priority=priority)
    request.arrival = index
    return request


@given(
    st.lists(st.tuples(st.integers(-2, 2), st.sampled_from(["push", "pop", "remove"]), st.integers(0, 30)), max_size=50)
)
def test_agrees_with_a_sorted_list(calls: list[tuple[int, str, int]]) -> None:
    queue, model = WaitingQueue(), []
    for index, (priority, call, number) in enumerate(calls):
        if call == "push":
            model.append(request_of(index, priority))
            queue.push(model[-1])
        elif call == "pop" and model:
            assert queue.peek() is min(model, key=order)
            model.remove(best := queue.pop())
            assert all(order(best) < order(other) for other in model)
        elif call == "remove":
            request = next((r for r in model if r.request_id == f"r{number}"), None)
            assert queue.remove(f"r{number}") is request
            if request:
                model.remove(request)
                if number % 2:  # and back again, as after a preemption
                    queue.push(request)
                    model.append(request)
        assert len(queue) == len(model)
        assert all(request.request_id in queue for request in model)
    assert [queue.pop() for _ in range(len(queue))] == sorted(model, key=order)


def test_empty() -> None:
    queue = WaitingQueue()
    assert not queue and queue.remove("r1") is None
    with pytest.raises(IndexError):
        queue.peek()
    queue.push(request_of(1, 0))
    queue.remove("r1")
    with pytest.raises(IndexError):
        queue.pop()


def test_removed_entries_do_not_pile_up() -> None:
    queue = WaitingQueue()
    queue.push(request_of(0, -1))
    for index in range(1, 1000):
        queue.push(request_of(index, 0))
        queue.remove(f"r{index}")
    assert len(queue._heap) < 10


def test_refuses_a_request_twice() -> None:
    queue = WaitingQueue()
    queue.push(request_of(0, 0))
    with pytest.raises(AssertionError, match="r0 is already waiting"):
        queue.push(request_of(0, 0))
