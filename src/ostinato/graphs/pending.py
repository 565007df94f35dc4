"""Keys that are not recorded yet, and which of them to record next. No torch."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Sequence

from ostinato.graphs.dispatch import BatchKey
from ostinato.graphs.mode import RuntimeMode

__all__ = ["Capture", "PendingKeys", "first_keys"]

Index = tuple[RuntimeMode, BatchKey]


class Capture(enum.StrEnum):
    """When recordings are made: all before the engine is ready; or a few before, and the rest between steps, either
    those that steps have asked for or, in the end, all."""

    EAGER = "eager"
    LAZY = "lazy"
    BACKGROUND = "background"


def first_keys(keys: Sequence[Index], num_smallest: int) -> list[Index]:
    """What to record before an engine is ready that records the rest later, in the order of `keys`.

    Of each mode the largest, into whose memory later ones fit, and the `num_smallest` smallest, which serve few
    requests; everything between can be padded to the largest or run eagerly for a while.
    """
    chosen: set[Index] = set()
    for mode in {mode for mode, _ in keys}:
        ascending = sorted(key for other, key in keys if other is mode)
        chosen.update((mode, key) for key in (*ascending[:num_smallest], ascending[-1]))
    return [index for index in keys if index in chosen]


class PendingKeys:
    """Counts what steps would have used. With `on_demand`, only that is ever due."""

    def __init__(self, keys: Sequence[Index], *, on_demand: bool) -> None:
        self._missing = dict.fromkeys(sorted(keys, key=lambda index: index[1]))
        self._on_demand = on_demand
        self._demand: Counter[Index] = Counter()

    def __len__(self) -> int:
        return len(self._missing)

    def __iter__(self) -> Iterator[Index]:
        return iter(tuple(self._missing))

    def ask(self, mode: RuntimeMode, key: BatchKey) -> None:
        """A step would have used it."""
        if (mode, key) in self._missing:
            self._demand[mode, key] += 1

    def due(self) -> Index | None:
        """The one most asked for; of equals, and where none was asked for, the smallest. None when none is due."""
        if self._demand:
            most = max(self._demand.values())
            return min((index for index, count in self._demand.items() if count == most), key=lambda index: index[1])
        return None if self._on_demand else next(iter(self._missing), None)

    def done(self, index: Index) -> None:
        """It is recorded, or cannot be: it is not due any more."""
        self._missing.pop(index, None)
        self._demand.pop(index, None)
