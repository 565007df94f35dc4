"""From a stream of pieces to a response: server-sent events, or one body. What goes in them is a `Form`'s business.

A response that ends in whatever way, the client's leaving included, aborts what is unfinished.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Protocol

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from ostinato.engine.output import Delta, OutputState, join
from ostinato.engine.stream import Piece, RequestStream
from ostinato.errors import OstinatoError
from ostinato.request import FinishReason
from ostinato.server.errors import api_error
from ostinato.server.responses import DONE, PromptTokensDetails, Usage, encode, event

CLIENT_CLOSED_REQUEST = 499


class Form(Protocol):
    """The bodies of one kind of answer."""

    def chunks(self, piece: Piece, outputs: Sequence[OutputState]) -> Iterator[Struct]:
        """Of a stream: what one or more tokens of an answer are told as; nothing if they add no text."""
        ...

    def usage_chunk(self, usage: Usage) -> Struct:
        """The last one of a stream, where the client asked for it."""
        ...

    def whole(self, outputs: Sequence[OutputState], usage: Usage) -> Struct:
        """All of the answer at once."""
        ...


class EventStream(StreamingResponse):
    """Sends pieces as they come; tokens of an answer that came together leave in one event."""

    def __init__(self, stream: RequestStream, form: Form, *, include_usage: bool, num_prompts: int) -> None:
        self._stream = stream
        self._events = _events(stream, form, include_usage, num_prompts)
        super().__init__(
            self._events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stream:
            async with contextlib.aclosing(self._events):
                await super().__call__(scope, receive, send)


async def _events(stream: RequestStream, form: Form, include_usage: bool, num_prompts: int) -> AsyncGenerator[bytes]:
    try:
        async for pieces in stream:
            _check(pieces)
            chunks = [event(chunk) for piece in joined(pieces) for chunk in form.chunks(piece, stream.outputs)]
            if chunks:
                yield b"".join(chunks)
    except Exception as error:  # too late for a status: the stream itself says it
        yield b"data: " + api_error(error).body + b"\n\n" + DONE
        return
    if include_usage:
        yield event(form.usage_chunk(usage_of(stream.outputs, num_prompts))) + DONE
    else:
        yield DONE


def joined(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """One piece for each answer that is among them, in the order in which these begin."""
    if len(pieces) == 1:
        return pieces
    by_answer: dict[int, list[Delta]] = {}
    for answer, delta in pieces:
        by_answer.setdefault(answer, []).append(delta)
    return [Piece(answer, join(deltas)) for answer, deltas in by_answer.items()]


async def whole(request: Request, stream: RequestStream, form: Form, *, num_prompts: int) -> Response:
    """Waits for the end. Raises what ends the stream before."""
    with stream:
        async with _closed_on_disconnect(request, stream) as gone:
            async for pieces in stream:
                _check(pieces)
        if gone.is_set():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        body = form.whole(stream.outputs, usage_of(stream.outputs, num_prompts))
        return Response(encode(body), media_type="application/json")


def _check(pieces: Sequence[Piece]) -> None:
    """Raises OstinatoError for an answer that the engine gave up, alone; the other answers of the call end with it."""
    for _, delta in pieces:
        if delta.finish_reason == FinishReason.ERROR:
            raise OstinatoError(f"this answer could not be completed: {delta.stop_reason}")


@contextlib.asynccontextmanager
async def _closed_on_disconnect(request: Request, stream: RequestStream) -> AsyncIterator[asyncio.Event]:
    """The event tells whether the client left."""
    gone = asyncio.Event()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()
        stream.close()

    watcher = asyncio.create_task(watch())
    try:
        yield gone
    finally:
        watcher.cancel()


def usage_of(outputs: Sequence[OutputState], num_prompts: int) -> Usage:
    """Of finished answers. Each prompt counts once, however many answers it has; they lie side by side."""
    each = len(outputs) // num_prompts
    firsts = [output.request for output in outputs[::each]]
    num_prompt = sum(request.num_prompt_tokens for request in firsts)
    num_output = sum(output.num_tokens for output in outputs)
    cached = sum(request.num_cached_tokens for request in firsts)
    return Usage(num_prompt, num_output, num_prompt + num_output, PromptTokensDetails(cached))
