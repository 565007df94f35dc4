"""Batches for an event loop: nothing is lost or out of order, and a busy loop rests in between."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine

from ostinato.engine.deliveries import LOOP_SHARE, Deliveries


def on_a_loop(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(test())

    return run


async def settled(turns: int = 10) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


@on_a_loop
async def test_everything_in_order_from_another_thread() -> None:
    got: list[int] = []
    done = asyncio.Event()

    def deliver(items: list[int]) -> None:
        assert items
        got.extend(items)
        if len(got) == 5000:
            done.set()

    deliveries = Deliveries(asyncio.get_running_loop(), deliver)
    thread = threading.Thread(target=lambda: [deliveries.put(number) for number in range(5000)])
    thread.start()
    await asyncio.wait_for(done.wait(), 60)
    thread.join()
    assert got == list(range(5000))


@on_a_loop
async def test_a_busy_loop_rests_and_then_takes_all_that_came() -> None:
    """What a batch wakes counts: here a task that computes for 20 ms, by the clock of the test."""
    now = 0.0
    batches: list[list[int]] = []
    loop = asyncio.get_running_loop()

    def compute() -> None:
        nonlocal now
        now += 0.020

    def deliver(items: list[int]) -> None:
        batches.append(items)
        loop.call_soon(compute)

    deliveries = Deliveries(loop, deliver, clock=lambda: now)
    deliveries.put(1)
    await settled()
    began = loop.time()
    for number in (2, 3, 4):
        deliveries.put(number)
        await settled()
        assert batches == [[1]], "it rests"
    while len(batches) == 1:
        await asyncio.sleep(0.001)
    assert batches == [[1], [2, 3, 4]]
    assert loop.time() - began > 0.5 * 0.020 * (1 / LOOP_SHARE - 1)


@on_a_loop
async def test_an_idle_loop_delivers_at_once() -> None:
    batches: list[list[int]] = []
    deliveries = Deliveries(asyncio.get_running_loop(), batches.append)
    for number in range(3):
        deliveries.put(number)
        await settled()
    assert batches == [[0], [1], [2]]


@on_a_loop
async def test_flush_and_a_closed_loop() -> None:
    batches: list[list[int]] = []
    deliveries = Deliveries(asyncio.get_running_loop(), batches.append)
    deliveries.put(1)
    deliveries.put(2)
    deliveries.flush()
    assert batches == [[1, 2]]
    await settled()
    assert batches == [[1, 2]]
    loop = asyncio.new_event_loop()
    loop.close()
    Deliveries(loop, batches.append).put(3)
    assert batches == [[1, 2]]
