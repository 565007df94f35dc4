"""Text completions as OpenAI spells them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from msgspec import UNSET, Struct, UnsetType

from ostinato.engine.output import OutputState
from ostinato.engine.stream import Piece
from ostinato.server.logprobs import Spelling, Table, completion_logprobs
from ostinato.server.responses import Completion, CompletionChoice, CompletionLogprobs, Usage


class CompletionForm:
    """Of one request. `echoes` are the texts of the prompts, one for each answer, where they are to come before it."""

    def __init__(
        self,
        request_id: str,
        model: str,
        *,
        num_top: int | None,
        include_usage: bool,
        spelling: Spelling,
        echoes: Sequence[str] | None,
    ) -> None:
        self._id, self._model, self._created = request_id, model, int(time.time())
        self._num_top, self._include_usage, self._spelling = num_top, include_usage, spelling
        self._echoes = echoes
        self._lengths: dict[int, int] = {}  # characters of an answer so far, by its index

    def chunks(self, piece: Piece, outputs: Sequence[OutputState]) -> Iterator[Struct]:
        index, delta = piece
        text, offset = delta.text, self._lengths.get(index)
        token_ids: list[int] = list(delta.token_ids)
        tables: list[Table | None] = list(delta.logprobs)
        if offset is None:
            offset = 0
            if self._echoes is not None:
                text = self._echoes[index] + text
                output = outputs[index]
                token_ids = [*output.request.prompt_token_ids, *token_ids]
                tables = [*(output.prompt_logprobs or ()), *tables]
        self._lengths[index] = offset + len(text)
        logprobs = self._logprobs(token_ids, tables, offset)
        if text or logprobs is not None or delta.finished:
            choice = CompletionChoice(index, text, logprobs, delta.finish_reason, delta.stop_reason)
            yield self._completion([choice], None if self._include_usage else UNSET)

    def usage_chunk(self, usage: Usage) -> Struct:
        return self._completion([], usage)

    def whole(self, outputs: Sequence[OutputState], usage: Usage) -> Struct:
        choices = []
        for index, output in enumerate(outputs):
            done = output.completion(index)
            text, token_ids, tables = done.text, done.token_ids, list[Table | None](output.logprobs)
            if self._echoes is not None:
                text = self._echoes[index] + text
                token_ids = [*output.request.prompt_token_ids, *token_ids]
                tables = [*(output.prompt_logprobs or ()), *tables]
            logprobs = self._logprobs(token_ids, tables, 0)
            choices.append(CompletionChoice(index, text, logprobs, done.finish_reason, done.stop_reason))
        return self._completion(choices, usage)

    def _logprobs(
        self, token_ids: Sequence[int], tables: Sequence[Table | None], offset: int
    ) -> CompletionLogprobs | None:
        if self._num_top is None:
            return None
        return completion_logprobs(token_ids, tables, self._num_top, self._spelling, offset)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self._id, self._created, self._model, choices, usage)
