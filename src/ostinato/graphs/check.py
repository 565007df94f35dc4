"""Twin: the same step as a replay and as an eager call, from the same state, compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch

from ostinato.errors import StaleGraphError
from ostinato.graphs.bits import as_bits, poison_

__all__ = ["Twin", "poison_"]

State = TypeVar("State")


class Twin(Generic[State]):
    """Checks replays against eager calls.

    `snapshot()` copies the state that a step reads and changes and `restore(state)` puts it back; `observe()` returns
    copies of what to compare, by name; `describe(name, index)` says in the caller's words which element that is.
    """

    def __init__(
        self,
        *,
        snapshot: Callable[[], State],
        restore: Callable[[State], None],
        observe: Callable[[], Mapping[str, torch.Tensor]],
        describe: Callable[[str, tuple[int, ...]], str] | None = None,
    ) -> None:
        self._snapshot = snapshot
        self._restore = restore
        self._observe = observe
        self._describe = describe or _describe

    def run(self, replay: Callable[[], None], eager: Callable[[], None], *, prove: bool = False) -> None:
        """Runs both from the present state and leaves what the eager call made.

        With `prove`, the eager call is made twice first, so that a step which does not agree with itself is not
        blamed on its recording. Raises StaleGraphError that names the field, the element and both values.
        """
        state = self._snapshot()
        replayed = self._seen_after(replay, None)
        if prove:
            first = self._seen_after(eager, state)
            second = self._seen_after(eager, state)
            self._compare(
                first, second, "two eager calls of the same step differ, so nothing can be checked against them"
            )
            seen = second
        else:
            seen = self._seen_after(eager, state)
        self._compare(replayed, seen, "a replay and the eager call of the same step differ")

    def _seen_after(self, run: Callable[[], None], state: State | None) -> Mapping[str, torch.Tensor]:
        if state is not None:
            self._restore(state)
        run()
        return self._observe()

    def _compare(self, left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor], what: str) -> None:
        if left.keys() != right.keys():
            raise StaleGraphError(f"{what}: they show different fields, {sorted(left)} and {sorted(right)}")
        for name, one in left.items():
            other = right[name]
            if one.shape != other.shape or one.dtype != other.dtype:
                raise StaleGraphError(
                    f"{what}: {name} is {one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
                )
            if torch.equal(as_bits(one), as_bits(other)):
                continue
            wrong = (as_bits(one) != as_bits(other)).nonzero()
            index = tuple(int(position) for position in wrong[0])
            raise StaleGraphError(
                f"{what}: {self._describe(name, index)}: {one[index].item()!r} and {other[index].item()!r} "
                f"({len(wrong)} of {one.numel()} elements differ). The recording reads or writes memory that the step "
                "does not, or a number of the host's was fixed in it"
            )


def _describe(name: str, index: tuple[int, ...]) -> str:
    return f"{name}{list(index)}"
