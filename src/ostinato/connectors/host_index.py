"""Which blocks host memory holds, by digest: slots, least recently used first, and those that must stay for now.
No torch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

__all__ = ["HostIndex"]


class HostIndex:
    """`capacity` slots for blocks. A slot that is held is not given to another block."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # the longest unused first
        self._free = list(range(capacity - 1, -1, -1))
        self._holds: Counter[int] = Counter()
        self._nameless: set[int] = set()  # held, and cannot be found (any more, or yet): free once nobody holds them

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, digest: object) -> bool:
        return digest in self._slots

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The slots of the longest run of `digests`, from the first on, that is here; they count as used."""
        found = []
        for digest in digests:
            slot = self._slots.get(digest)
            if slot is None:
                break
            self._slots.move_to_end(digest)
            found.append(slot)
        return found

    def add(self, digest: bytes) -> int | None:
        """A slot for a block that is not here yet, that of the longest unused if need be. None if it is here, or if
        every slot is held."""
        if digest in self._slots:
            self._slots.move_to_end(digest)
            return None
        slot = self._take()
        if slot is not None:
            self._slots[digest] = slot
        return slot

    def reserve(self) -> int | None:
        """A slot, held once, for a block that is not complete yet and so must not be found. None if every one is held.
        Whoever releases it without a name gives it up."""
        slot = self._take()
        if slot is not None:
            self._nameless.add(slot)
            self._holds[slot] += 1
        return slot

    def name(self, slot: int, digest: bytes) -> int:
        """The content of a reserved slot is complete: it can be found. The slot that holds it, which is another one if
        it came there meanwhile; the hold moves to that."""
        known = self._slots.get(digest)
        if known is None:
            self._nameless.remove(slot)
            self._slots[digest] = slot
            return slot
        self._holds[known] += 1
        self.release([slot])
        return known

    def _take(self) -> int | None:
        if not self._free:
            victim = next((old for old, slot in self._slots.items() if not self._holds[slot]), None)
            if victim is None:
                return None
            self._free.append(self._slots.pop(victim))
        return self._free.pop()

    def hold(self, slots: Iterable[int]) -> None:
        """Each once more."""
        self._holds.update(slots)

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._holds[slot] -= 1
            if self._holds[slot] == 0:
                del self._holds[slot]
                if slot in self._nameless:
                    self._nameless.remove(slot)
                    self._free.append(slot)

    def clear(self) -> None:
        """Nothing is here any more."""
        for slot in self._slots.values():
            if self._holds[slot]:
                self._nameless.add(slot)
            else:
                self._free.append(slot)
        self._slots.clear()
