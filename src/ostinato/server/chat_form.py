"""Chat completions as OpenAI spells them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from msgspec import Struct

from ostinato.engine.output import OutputState
from ostinato.engine.stream import Piece
from ostinato.server.logprobs import Spelling, chat_logprobs
from ostinato.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    Usage,
)


class ChatForm:
    """Of one request. `num_top` alternatives are told with each token, None for no log-probabilities at all."""

    def __init__(
        self, request_id: str, model: str, *, num_top: int | None, include_usage: bool, spelling: Spelling
    ) -> None:
        self._id, self._model, self._created = request_id, model, int(time.time())
        self._num_top, self._include_usage, self._spelling = num_top, include_usage, spelling
        self._begun: set[int] = set()

    def chunks(self, piece: Piece, outputs: Sequence[OutputState]) -> Iterator[Struct]:
        index, delta = piece
        if index not in self._begun:
            self._begun.add(index)
            yield self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))
        logprobs = None
        if self._num_top is not None:
            logprobs = chat_logprobs(delta.logprobs, self._num_top, self._spelling)
        if delta.text or logprobs is not None:
            yield self._chunk(ChatChunkChoice(index, ChatDelta(content=delta.text), logprobs))
        if delta.finished:
            yield self._chunk(
                ChatChunkChoice(index, ChatDelta(), finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
            )

    def usage_chunk(self, usage: Usage) -> Struct:
        return ChatChunk(self._id, self._created, self._model, [], usage)

    def whole(self, outputs: Sequence[OutputState], usage: Usage) -> Struct:
        choices = []
        for index, output in enumerate(outputs):
            done = output.completion(index)
            logprobs = None
            if self._num_top is not None:
                logprobs = chat_logprobs(output.logprobs, self._num_top, self._spelling)
            choices.append(ChatChoice(index, ChatMessage(done.text), logprobs, done.finish_reason, done.stop_reason))
        return ChatCompletion(self._id, self._created, self._model, choices, usage)

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        if self._include_usage:  # then every chunk has the field, and the last one the numbers
            return ChatChunk(self._id, self._created, self._model, [choice], None)
        return ChatChunk(self._id, self._created, self._model, [choice])
