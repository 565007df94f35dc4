"""The newest launches, told to the log when a step fails. No torch: the device may be what failed, and is not asked.

While all goes well it costs one append a launch: plans and decisions are kept as they are, and text is made of them
only when there is something to tell.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ostinato.graphs.dispatch import Decision
from ostinato.runner.host_tables import HostTables
from ostinato.step import RowPlan, StepPlan

logger = logging.getLogger("ostinato")

NUM_KEPT = 64
_NUM_FULL = 4
"""Launches, the newest ones, that are told with all their rows; of the others the first `_MOST_ROWS`."""
_MOST_ROWS = 8


def _unknown(request_id: str) -> Sequence[int]:
    return ()


class LaunchHistory:
    """The last `NUM_KEPT` launches, and with them their plans, prompts included.

    `table_of(request_id)` gives the blocks that a running request holds now, nothing for any other: it is asked for
    tables that were begun before the oldest launch kept.
    """

    def __init__(self) -> None:
        self.table_of: Callable[[str], Sequence[int]] = _unknown
        self._launches: deque[tuple[StepPlan, Decision]] = deque(maxlen=NUM_KEPT)

    def add(self, plan: StepPlan, decision: Decision) -> None:
        """`plan` is about to be launched."""
        self._launches.append((plan, decision))

    def report(self, error: BaseException, what: str, plan: StepPlan) -> None:
        """Logs the launches as an error, and notes on `error` that it did. `what`: launch or collect, of `plan`.

        Each launch is told of once. Never raises: `error` is what the caller has to hear of.
        """
        try:
            count, text = len(self._launches), "\n".join(self._lines())
        except Exception as failure:
            count, text = 0, f"(they cannot be told: {type(failure).__name__}: {failure})"
        self._launches.clear()
        head = f"{what} of step {plan.step_id} failed: {type(error).__name__}: {error}"
        logger.error("%s\n%s not told of before, the latest last:\n%s", head, _launches(count), text)
        error.add_note(
            f"in {what} of step {plan.step_id}: the log has the newest launches ({count} not told of before)"
        )

    def _lines(self) -> Iterator[str]:
        tables = HostTables(self._first_tables())
        for left, (plan, decision) in zip(range(len(self._launches), 0, -1), self._launches, strict=True):
            tables.follow(plan)
            yield (
                f"step {plan.step_id}: {decision.mode.value} {decision.key.name} ({decision.reason.value}), "
                f"{_count(plan.num_rows, 'row')}, {_count(plan.num_tokens, 'token')}"
            )
            shown = plan.num_rows if left <= _NUM_FULL else _MOST_ROWS
            for index, row in enumerate(plan.rows[:shown]):
                yield f"  row {index}: {_describe(row, tables.rows.get(row.slot, ()))}"
            if plan.num_rows > shown:
                yield f"  and {_count(plan.num_rows - shown, 'row')} more"

    def _first_tables(self) -> dict[int, list[int]]:
        """What state rows held before the oldest launch kept, as far as later launches build on it: the table of now,
        up to the first block that was appended since. -1 for blocks that nobody remembers."""
        known: dict[int, list[int]] = {}
        begun: set[int] = set()  # state rows whose table begins with an admission that is kept
        admitted = {admission.request_id for plan, _ in self._launches for admission in plan.admissions}
        for plan, _ in self._launches:
            begun |= {admission.slot for admission in plan.admissions}
            owners = {row.slot: row.request_id for row in plan.rows}
            first = {append.slot: append.column for append in reversed(plan.appends)}
            for slot, request_id in owners.items():
                if slot in begun:
                    continue
                if slot not in known:
                    # a request that was admitted again since holds another table now
                    known[slot] = [] if request_id in admitted else list(self.table_of(request_id))
                if slot in first:
                    known[slot] = [*known[slot], *[-1] * first[slot]][: first[slot]]
                    begun.add(slot)
            for slot in first.keys() - owners.keys() - begun:
                known[slot] = [-1] * first[slot]
                begun.add(slot)
        return known


def _describe(row: RowPlan, table: Sequence[int]) -> str:
    """`request a, state row 2, start 17, 1 token, table of 2: 5-6`."""
    blocks = f"table of {len(table)}: {_ranges(table)}" if table else "table no longer known"
    tokens = _count(row.num_tokens, "token")
    return f"request {row.request_id}, state row {row.slot}, start {row.start}, {tokens}, {blocks}"


def _ranges(table: Sequence[int]) -> str:
    """`1-5 9 12-13`; `?` for each block that is not known."""
    parts: list[str] = []
    first = 0
    for index in range(1, len(table) + 1):
        if index < len(table) and table[index] == table[index - 1] + 1 and table[first] >= 0:
            continue
        low, high = table[first], table[index - 1]
        parts.append("?" if low < 0 else str(low) if low == high else f"{low}-{high}")
        first = index
    return " ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _launches(number: int) -> str:
    return f"{number} launch" if number == 1 else f"{number} launches"
