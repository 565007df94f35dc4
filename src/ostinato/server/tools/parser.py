"""Finds calls in a text that comes in pieces. The same calls are found however the text is cut."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ostinato.server.tools.syntax import Syntax

_MARKS = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


@dataclass(frozen=True, slots=True)
class Text:
    """Free text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """The call of this number has this name."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments' JSON text."""

    index: int
    text: str


Event = Text | CallBegins | Arguments


class CallParser:
    """`feed` pieces of one answer, then `finish`.

    Free text that only looks like the beginning of a call stays free text. Where an answer was cut short, a last call
    of which not even the name is known is left out once there were others, or where free text may not be.
    """

    def __init__(self, syntax: Syntax) -> None:
        self._syntax = syntax
        self._state = _State.BEFORE
        self._held = ""  # what may yet turn out to be part of a call's frame
        self.num_calls = 0  # of which the name is known
        self._scan = _ObjectEnd()

    def feed(self, text: str) -> list[Event]:
        """What these characters settle."""
        self._held += text
        events: list[Event] = []
        while True:
            state, length = self._state, len(self._held)
            events += self._go()
            if self._state is state and len(self._held) == length:
                return _joined(events)

    def finish(self) -> list[Event]:
        """What was held back, if it is free text."""
        held, self._held = self._held, ""
        free = self._syntax.text and self.num_calls == 0
        return [Text(held)] if held and free else []

    def _go(self) -> Iterator[Event]:
        syntax, held = self._syntax, self._held
        match self._state:
            case _State.BEFORE:
                yield from self._before(syntax.first if self.num_calls == 0 else syntax.following)
            case _State.NAME:
                opening = syntax.first if self.num_calls == 0 else syntax.following
                end = held.find(syntax.between, len(opening))
                if end >= 0:
                    name = held[len(opening) : end]
                    self._held = held[end + len(syntax.between) :]
                    self._state, self._scan = _State.ARGUMENTS, _ObjectEnd()
                    self.num_calls += 1
                    yield CallBegins(self.num_calls - 1, name)
            case _State.ARGUMENTS:
                length = self._scan.find(held)
                self._held = "" if length is None else held[length:]
                if length is not None:
                    self._state = _State.CLOSING
                if held[:length]:
                    yield Arguments(self.num_calls - 1, held[:length])
            case _State.CLOSING:
                if held.startswith(syntax.closing):
                    self._held, self._state = held[len(syntax.closing) :], _State.BEFORE
                elif not syntax.closing.startswith(held):
                    self._state = _State.TEXT
            case _State.TEXT:
                self._held = ""
                if held:
                    yield Text(held)

    def _before(self, opening: str) -> Iterator[Event]:
        """Free text up to a call, or the place between two calls."""
        held = self._held
        if self.num_calls == 0 and self._syntax.after_text:
            at = held.find(opening)
            free = held[:at] if at >= 0 else held[: len(held) - _overlap(held, opening)]
            self._held = held[len(free) :]
            if at >= 0:
                self._state = _State.NAME
            if free:
                yield Text(free)
        elif held.startswith(opening):
            self._state = _State.NAME
        elif self.num_calls and held and held == self._syntax.last:
            self._held = ""
        elif not opening.startswith(held):
            self._state = _State.TEXT


class _State(enum.Enum):
    BEFORE = enum.auto()  # a call may begin
    NAME = enum.auto()  # what is held begins with the opening of a call
    ARGUMENTS = enum.auto()
    CLOSING = enum.auto()
    TEXT = enum.auto()  # no call will come any more


class _ObjectEnd:
    """Where a JSON object ends, in a text that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def find(self, piece: str) -> int | None:
        """The number of characters of `piece` up to the end, None if it is not there yet."""
        at = 0
        while at < len(piece):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            mark = (_IN_STRING if self._in_string else _MARKS).search(piece, at)
            if mark is None:
                return None
            at = mark.end()
            match mark[0]:
                case "\\":
                    self._escaped = True
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return at
        return None


def _overlap(text: str, opening: str) -> int:
    """Length of the longest end of `text` with which `opening` begins."""
    for length in range(min(len(text), len(opening) - 1), 0, -1):
        if opening.startswith(text[-length:]):
            return length
    return 0


def _joined(events: list[Event]) -> list[Event]:
    """Neighbours that continue each other as one."""
    joined: list[Event] = []
    for event in events:
        match joined[-1] if joined else None, event:
            case Text(before), Text(after):
                joined[-1] = Text(before + after)
            case Arguments(index, before), Arguments(_, after):
                joined[-1] = Arguments(index, before + after)
            case _:
                joined.append(event)
    return joined
