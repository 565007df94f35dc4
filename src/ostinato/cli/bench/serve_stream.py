"""What a server streams, from bytes to tokens: the event-stream format, and the chunks of OpenAI's API inside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

DONE = "[DONE]"

_LINE_END = re.compile(rb"\r\n|\n|\r")
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


class StreamError(Exception):
    """The server sent something that is no answer. `reason` is what the failure is counted under."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


class EventParser:
    """Bytes as they arrive, cut anywhere, to the data of each event (the `data:` lines joined by line feeds).

    Follows the WHATWG event-stream format: lines end with CR, LF or both, a blank line ends an event, a colon starts
    a comment; fields other than `data`, and events without any, are of no use here.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._at_start = True

    def feed(self, received: bytes) -> Iterator[str]:
        self._rest += received
        if self._at_start:
            if len(self._rest) < 3 and b"\xef\xbb\xbf".startswith(self._rest):
                return
            self._rest, self._at_start = self._rest.removeprefix(b"\xef\xbb\xbf"), False
        start = 0
        for end in _LINE_END.finditer(self._rest):
            if end.group() == b"\r" and end.end() == len(self._rest):
                break  # the first half of CR LF, perhaps
            line, start = self._rest[start : end.start()], end.end()
            if line.startswith(b"data"):
                name, _, value = line.partition(b":")
                if name == b"data":
                    self._data.append(value.removeprefix(b" "))
            elif not line:
                if any(self._data):
                    yield b"\n".join(self._data).decode("utf-8", "replace")
                self._data.clear()
        self._rest = self._rest[start:]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event: whether it brings output (one token or more), whether it ends the choice, and the usage if any."""

    has_output: bool
    finished: bool
    prompt_tokens: int | None = None
    output_tokens: int | None = None


def read_chunk(data: str) -> Chunk:
    """Raises StreamError for an error that the server reports in the stream, and for what is not JSON.

    A chunk without text counts as output if it may stand for a token whose text is still open (half a character): not
    the one that opens a chat message with its role, nor the one that only says why the answer ended.
    """
    try:
        body = json.loads(data)
    except ValueError:
        raise StreamError("a chunk is not JSON", shorten(data)) from None
    if not isinstance(body, dict):
        raise StreamError("a chunk is not a JSON object", shorten(data))
    if (error := body.get("error")) is not None:
        raise StreamError("error in the stream", error_message(error))
    usage = body.get("usage")
    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens")) if isinstance(usage, dict) else (None, None)
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    if choice is None:
        return Chunk(False, False, *counts)
    finished = choice.get("finish_reason") is not None
    return Chunk(_has_output(choice, finished), finished, *counts)


def _has_output(choice: dict[str, Any], finished: bool) -> bool:
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        text = choice.get("text")
        return bool(text) or (text is not None and not finished)
    if any(delta.get(field) for field in _TEXT_FIELDS):
        return True
    return not finished and "role" not in delta and delta.get("content") is not None


def error_message(error: object) -> str:
    """The message inside an error body: OpenAI's `{"message"}`, FastAPI's `{"detail"}`, or whatever it is."""
    while isinstance(error, dict):
        inner = next((error[name] for name in ("error", "message", "detail") if error.get(name)), None)
        error = json.dumps(error) if inner is None else inner
    return shorten(str(error))


def shorten(text: str, limit: int = 160) -> str:
    """On one line and not endless."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
