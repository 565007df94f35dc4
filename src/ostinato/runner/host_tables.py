"""Block tables of the state rows as the host has sent them: plans followed in the order of their launch. No torch."""

from __future__ import annotations

from ostinato.step import StepPlan


class HostTables:
    """`rows`: by state row, the physical block of each `block_size` positions."""

    def __init__(self, rows: dict[int, list[int]] | None = None) -> None:
        self.rows: dict[int, list[int]] = rows or {}

    def follow(self, plan: StepPlan) -> None:
        """Takes over the plan's admissions and appended blocks. Every row that it appends to must have a table."""
        for admission in plan.admissions:
            self.rows[admission.slot] = list(admission.block_ids)
        for append in plan.appends:
            table = self.rows[append.slot]
            del table[append.column :]
            table.extend(append.block_ids)
