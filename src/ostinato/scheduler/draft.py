"""A step while it is being planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ostinato.request import Request
from ostinato.step import Admission, RowPlan, StepPlan, TableAppend, TokenMask

__all__ = ["Draft", "num_planned"]


_new_tuple = tuple.__new__
"""Of a named tuple, without the Python function in between: every row of every step makes one."""


def num_planned(request: Request) -> int:
    """The request's length once every sample in flight has arrived."""
    return len(request.tokens) + request.num_in_flight


@dataclass(slots=True)
class Draft:
    """Rows, admissions and appended blocks so far, and the `budget` of tokens that is left."""

    budget: int
    short: bool = False  # a better row waits for blocks: worse rows must not take them
    _rows: list[RowPlan] = field(default_factory=list)
    _requests: list[Request] = field(default_factory=list)
    _sorted: bool = True
    _last_slot: int = -1
    _admissions: list[Admission] = field(default_factory=list)
    _appends: list[TableAppend] = field(default_factory=list)
    _masks: list[TokenMask] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._rows)

    def admit(self, request: Request, block_ids: Sequence[int]) -> None:
        """The request takes its row: the device learns all that is known about it."""
        assert request.slot is not None
        self._admissions.append(
            Admission(
                request_id=request.request_id,
                slot=request.slot,
                token_ids=tuple(request.tokens),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed=request.num_computed,
                block_ids=tuple(block_ids),
                params=request.params,
                stop_token_ids=request.stop_token_ids,
                seed=request.seed,
            )
        )

    def append(self, request: Request, column: int, block_ids: Sequence[int]) -> None:
        """Blocks for the request's table, from `column` on."""
        assert request.slot is not None
        self._appends.append(TableAppend(request.slot, column, tuple(block_ids)))

    def run(self, request: Request, num_tokens: int) -> None:
        """Add the request's row, and count its tokens as computed and its sample as on its way."""
        slot, start = request.slot, request.num_computed
        assert slot is not None
        end = start + num_tokens
        samples = end == len(request.tokens) + request.num_in_flight
        if slot < self._last_slot:
            self._sorted = False
        self._last_slot = slot
        self._rows.append(_new_tuple(RowPlan, (request.request_id, slot, start, num_tokens, samples)))
        self._requests.append(request)
        self.budget -= num_tokens
        request.num_computed = end
        if samples:
            request.num_in_flight += 1
            if request.grammar is not None:
                self._masks.append(TokenMask(slot, request.grammar.mask()))

    def build(self, step_id: int, connector_meta: object | None = None) -> tuple[StepPlan, list[Request]]:
        """The plan, its rows by slot so that a steady batch looks the same at every step, and each row's request."""
        rows, requests = self._rows, self._requests
        if not self._sorted:
            places = sorted(range(len(rows)), key=lambda place: rows[place].slot)
            rows, requests = [rows[place] for place in places], [requests[place] for place in places]
        changes = (tuple(self._admissions), tuple(self._appends), tuple(self._masks))
        plan = StepPlan(step_id, tuple(rows), *changes, connector_meta)
        return plan, requests
