"""Chat completions as OpenAI spells them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import UNSET, Struct

from ostinato.engine.output import OutputState
from ostinato.engine.stream import Piece
from ostinato.request import FinishReason
from ostinato.server.logprobs import Spelling, chat_logprobs
from ostinato.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from ostinato.server.serving import new_id
from ostinato.server.tools.choice import ToolChoice
from ostinato.server.tools.parser import Arguments, CallBegins, CallParser, Event, Text


class Reader(Protocol):
    """Takes one answer's text apart."""

    num_calls: int

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class _Plain:
    """Nothing is called."""

    num_calls = 0

    def feed(self, text: str) -> list[Event]:
        return [Text(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class _Named:
    """All of it is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name, self.num_calls = name, 0

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        if text and not self.num_calls:
            self.num_calls = 1
            events.append(CallBegins(0, self._name))
        return [*events, Arguments(0, text)] if text else []

    def finish(self) -> list[Event]:
        return []


class ChatForm:
    """Of one request. `num_top` alternatives are told with each token, None for no log-probabilities at all. `choice`
    says which calls there may be."""

    def __init__(
        self,
        request_id: str,
        model: str,
        *,
        num_top: int | None,
        include_usage: bool,
        spelling: Spelling,
        choice: ToolChoice | None = None,
    ) -> None:
        self._id, self._model, self._created = request_id, model, int(time.time())
        self._num_top, self._include_usage, self._spelling = num_top, include_usage, spelling
        self._choice = choice
        self._readers: dict[int, Reader] = {}

    def chunks(self, piece: Piece, outputs: Sequence[OutputState]) -> Iterator[Struct]:
        index, delta = piece
        if index not in self._readers:
            self._readers[index] = _reader(self._choice)
            content = "" if self._choice is None else UNSET
            yield self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content=content)))
        reader = self._readers[index]
        logprobs = None
        if self._num_top is not None:
            logprobs = chat_logprobs(delta.logprobs, self._num_top, self._spelling)
        events = reader.feed(delta.text)
        if delta.finished:
            events += reader.finish()
        if not events and logprobs is not None:
            events.append(Text(""))  # they need a chunk to be in
        for event in events:
            yield self._chunk(ChatChunkChoice(index, _delta(event), logprobs))
            logprobs = None  # told once
        if delta.finished:
            reason = self._finish_reason(delta.finish_reason, reader)
            yield self._chunk(ChatChunkChoice(index, ChatDelta(), finish_reason=reason, stop_reason=delta.stop_reason))

    def usage_chunk(self, usage: Usage) -> Struct:
        return ChatChunk(self._id, self._created, self._model, [], usage)

    def whole(self, outputs: Sequence[OutputState], usage: Usage) -> Struct:
        choices = []
        for index, output in enumerate(outputs):
            done = output.completion(index)
            logprobs = None
            if self._num_top is not None:
                logprobs = chat_logprobs(output.logprobs, self._num_top, self._spelling)
            reader = _reader(self._choice)
            message = _message(reader.feed(done.text) + reader.finish(), self._choice is not None)
            reason = self._finish_reason(done.finish_reason, reader)
            choices.append(ChatChoice(index, message, logprobs, reason, done.stop_reason))
        return ChatCompletion(self._id, self._created, self._model, choices, usage)

    def _finish_reason(self, reason: str | None, reader: Reader) -> str | None:
        """A named function is called because the client said so, of which OpenAI does not tell."""
        named = self._choice is not None and self._choice.named is not None
        return "tool_calls" if reason == FinishReason.STOP and reader.num_calls and not named else reason

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        if self._include_usage:  # then every chunk has the field, and the last one the numbers
            return ChatChunk(self._id, self._created, self._model, [choice], None)
        return ChatChunk(self._id, self._created, self._model, [choice])


def _reader(choice: ToolChoice | None) -> Reader:
    if choice is None:
        return _Plain()
    if choice.named is not None:
        return _Named(choice.named)
    assert choice.syntax is not None
    return CallParser(choice.syntax)


def _delta(event: Event) -> ChatDelta:
    match event:
        case Text(text):
            return ChatDelta(content=text)
        case CallBegins(index, name):
            return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionCallDelta("", name), new_id("call"), "function")])
        case Arguments(index, text):
            return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionCallDelta(text))])


def _message(events: Sequence[Event], with_tools: bool) -> ChatMessage:
    texts: list[str] = []
    calls: list[ToolCall] = []
    for event in events:
        match event:
            case Text(text):
                texts.append(text)
            case CallBegins(_, name):
                calls.append(ToolCall(new_id("call"), FunctionCall(name, "")))
            case Arguments(index, text):
                calls[index].function.arguments += text
    content = "".join(texts)
    return ChatMessage(content or (None if with_tools else ""), tool_calls=calls or UNSET)
