"""What the engine's thread makes, handed to an event loop that must not take the engine's time.

Both need the interpreter's lock. With many streams, telling each of every token takes the loop longer than a step takes
the device, and the engine would wait for it. So the loop takes what has come in batches, and after a batch it rests
until it has used no more than its share of the time: the more streams, the more tokens a batch has.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

LOOP_SHARE = 0.4
"""Of the time, for deliveries and for what they wake. A step's own host work takes about as much."""

_SHORT_S = 0.001
"""A rest that is not worth a timer."""


class Deliveries(Generic[T]):
    """`deliver(items)` runs on the loop, as does everything but `put`. Items keep their order."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[list[T]], None],
        *,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`clock` tells the seconds that the calling thread has computed."""
        self._loop, self._deliver, self._clock = loop, deliver, clock
        self._lock = threading.Lock()
        self._items: list[T] = []
        self._is_due = False

    def put(self, item: T) -> None:
        """From any thread; does not wait. Nothing happens once the loop is closed."""
        with self._lock:
            self._items.append(item)
            if self._is_due:
                return
            self._is_due = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._run)

    def flush(self) -> None:
        """Delivers now what waits."""
        with self._lock:
            items, self._items = self._items, []
        if items:
            self._deliver(items)

    def _run(self) -> None:
        with self._lock:
            if not self._items:
                self._is_due = False
                return
        before = self._clock()
        self.flush()
        # what this woke is in the loop's queue already, and this comes behind it
        self._loop.call_soon(self._rest, before)

    def _rest(self, before: float) -> None:
        pause = (self._clock() - before) * (1 / LOOP_SHARE - 1)
        if pause < _SHORT_S:
            self._run()
        else:
            self._loop.call_later(pause, self._run)
