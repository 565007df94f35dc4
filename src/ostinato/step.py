"""The plain data that crosses between scheduler and runner: one plan down, one result up. No torch.

A plan is ints only. It says which rows of the device-resident request state take part, how many tokens of each, and
what has to change in that state first: rows that begin (admissions), blocks appended to a row's table, and for a row
whose output has a structure, the tokens that it may draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ostinato.request import SamplingParams


class RowPlan(NamedTuple):
    """One request's part of a step: `num_tokens` tokens from position `start` of the sequence in state row `slot`.

    `samples` is true when the step reaches the end of the known tokens, so that a new token comes out. A tuple, because
    every row of every step makes one.
    """

    request_id: str
    slot: int
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes state row `slot`: all its known tokens, and how many of them the cache already holds.

    `block_ids` is the row's whole table so far, cached prefix first.
    """

    request_id: str
    slot: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    num_computed: int
    block_ids: Sequence[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]
    seed: int


@dataclass(frozen=True, slots=True)
class TableAppend:
    """Blocks appended to row `slot`'s table from column `column` on."""

    slot: int
    column: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that row `slot` may draw in this step: a bit each, in 32-bit words, the lowest bit first."""

    slot: int
    words: bytes


@dataclass(frozen=True, slots=True)
class StepPlan:
    step_id: int
    rows: tuple[RowPlan, ...]
    admissions: tuple[Admission, ...] = ()
    appends: tuple[TableAppend, ...] = ()
    masks: tuple[TokenMask, ...] = ()
    connector_meta: object | None = None  # what the KV connector's worker side has to do for this step

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def query_len(self) -> int | None:
        """The query length that every row has, or None when they differ."""
        lengths = {row.num_tokens for row in self.rows}
        return lengths.pop() if len(lengths) == 1 else None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log-probabilities at one position: the chosen token's, its rank, and the likeliest alternatives."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class PromptRows(NamedTuple):
    """Log-probabilities of the prompt's tokens from number `first` on."""

    first: int
    rows: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, row by row in the plan's order; -1 where the row did not sample."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: dict[str, PromptRows] | None = None
