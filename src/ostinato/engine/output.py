"""One request's output as it grows: text from tokens, stop strings, log-probabilities. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ostinato.request import CompletionOutput, Logprob, Request
from ostinato.step import PromptRows, TokenLogprobs
from ostinato.tokenizer.detokenizer import IncrementalDetokenizer, StopChecker
from ostinato.tokenizer.tokenizer import Tokenizer


class Delta(NamedTuple):
    """What one collected token added, or several (`join`). `text` may be empty: half a character, or the beginning of a
    stop string."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finished: bool
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[dict[int, Logprob], ...] = ()


def join(deltas: Sequence[Delta]) -> Delta:
    """One for several of one request, in their order."""
    if len(deltas) == 1:
        return deltas[0]
    token_ids: list[int] = []
    texts: list[str] = []
    tables: list[dict[int, Logprob]] = []
    for _, new_ids, text, *_, new_tables in deltas:
        token_ids += new_ids
        texts.append(text)
        tables += new_tables
    last = deltas[-1]
    return Delta(
        last.request_id,
        tuple(token_ids),
        "".join(texts),
        last.finished,
        last.finish_reason,
        last.stop_reason,
        tuple(tables),
    )


@dataclass(slots=True)
class OutputState:
    """Grows by `token` and ends with `finish`."""

    request: Request
    tokenizer: Tokenizer | None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    cumulative_logprob: float = 0.0
    num_tokens: int = 0
    pending: deque[Delta] | None = None  # for whoever streams this request: deltas it has not taken yet
    _texts: list[str] = field(default_factory=list)
    _detokenizer: IncrementalDetokenizer | None = None
    _stops: StopChecker | None = None

    def __post_init__(self) -> None:
        params = self.request.params
        if self.tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                self.tokenizer, params.skip_special_tokens, self.request.prompt_token_ids
            )
            if params.stop_strings:
                self._stops = StopChecker(params.stop_strings, params.include_stop_str_in_output)
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._texts)

    def token(self, token_id: int, logprobs: TokenLogprobs | None, *, is_stop: bool) -> tuple[str, str | None]:
        """Adds one token; returns (new text, the stop string that it completed). A stop id adds no text."""
        self.num_tokens += 1
        if logprobs is not None:
            self.logprobs.append(self._table(logprobs))
            self.cumulative_logprob += logprobs.logprob
        if self._detokenizer is None or is_stop:
            return "", None
        return self._emit(self._detokenizer.append(token_id))

    def add_prompt_logprobs(self, part: PromptRows) -> None:
        """A preempted request computes its prompt again: what is known already stays."""
        if self.prompt_logprobs is not None:
            known = len(self.prompt_logprobs) - part.first
            self.prompt_logprobs.extend(self._table(row) for row in part.rows[known:])

    def finish(self) -> str:
        """Text still held back: an unfinished character, or what might have become a stop string."""
        if self._detokenizer is None:
            return ""
        text, _ = self._emit(self._detokenizer.flush())
        if self._stops is not None:
            rest = self._stops.flush()
            self._texts.append(rest)
            text += rest
        return text

    def _emit(self, text: str) -> tuple[str, str | None]:
        matched = None
        if self._stops is not None:
            text, matched = self._stops.feed(text)
        self._texts.append(text)
        return text, matched

    def _table(self, row: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token first, then the likeliest, as vLLM orders them."""
        table = {row.token_id: Logprob(row.logprob, row.rank, self._decode(row.token_id))}
        for rank, (token, value) in enumerate(zip(row.top_ids, row.top_logprobs, strict=True), start=1):
            table.setdefault(token, Logprob(value, rank, self._decode(token)))
        return table

    def _decode(self, token_id: int) -> str | None:
        return self.tokenizer.decode([token_id], skip_special_tokens=False) if self.tokenizer is not None else None

    def completion(self, index: int) -> CompletionOutput:
        request = self.request
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=request.output_token_ids,
            finish_reason=str(request.finish_reason.value) if request.finish_reason else None,
            stop_reason=request.stop_reason,
            logprobs=self.logprobs if request.params.logprobs is not None else None,
            cumulative_logprob=self.cumulative_logprob if request.params.logprobs is not None else None,
        )
