"""Text out of a stream of token ids, a token at a time, and the search for stop strings in it.

A token need not end where a character ends. What is handed out is final: text that later tokens could still change is
held back. Both classes serve one sequence, in order, and cost about the same at every token however long it grows.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from ostinato.tokenizer.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_NUM_CONTEXT = 6
"""Prompt tokens that give the first output token its context."""

_MAX_HELD = 32
"""Tokens after which broken UTF-8 is handed out as it stands; a character takes 4 at most."""


class IncrementalDetokenizer:
    """Turns ids into text as they come: the pieces joined are `tokenizer.decode` of all the ids.

    `context_ids` are the ids that came before (the prompt). They matter only to tokenizers that drop the blank in
    front of a text, which the first output token of a continued text must keep.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, context_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream: _Stream = (
            _ByteStream(tokenizer) if tokenizer.is_byte_level else _PrefixStream(tokenizer, context_ids[-_NUM_CONTEXT:])
        )

    def append(self, token_id: int) -> str:
        """The text that is certain now and was not before; empty for a skipped token or part of a character."""
        return "" if token_id in self._skipped else self._stream.push(token_id)

    def flush(self) -> str:
        """The rest, when no more tokens come: a character that was never finished, as U+FFFD."""
        return self._stream.finish()


class _Stream(Protocol):
    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class _ByteStream:
    """For byte-level vocabularies, exactly: a token is its bytes, and a UTF-8 decoder keeps what is unfinished.

    Most tokens begin and end between characters. Their text is always the same, and is looked up after the first time.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_between = True  # characters

    def push(self, token_id: int) -> str:
        if self._is_between and (known := self._tokenizer.whole_texts.get(token_id)) is not None:
            return known
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        text, began_between = self._decoder.decode(token_bytes(token)), self._is_between
        self._is_between = not self._decoder.getstate()[0]
        if began_between and self._is_between:
            self._tokenizer.whole_texts[token_id] = text
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PrefixStream:
    """For any other decoder, by difference: a short window of ids is decoded with and without the new ones.

    The window begins where an earlier piece ended, so the decoder sees the new ids in a context that is whole. Text
    that ends in U+FFFD may be an unfinished character and waits.
    """

    def __init__(self, tokenizer: Tokenizer, context_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._restart(list(context_ids))

    def push(self, token_id: int) -> str:
        if self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) - self._num_known < _MAX_HELD:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        piece = text[len(self._known) :]
        if piece:
            self._restart(self._window[self._num_known :])
        return piece

    def _restart(self, window: list[int]) -> None:
        self._window, self._num_known, self._known = window, len(window), self._decode(window)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others follow from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


def token_bytes(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary spells; added tokens outside the alphabet are plain text."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


class StopChecker:
    """Watches text for stop strings; holds back the end of the text while it could be the beginning of one.

    The stop string that is complete first wins, whichever pieces the text comes in; of two that end on the same
    character, the longer. One Knuth-Morris-Pratt automaton per string, so every character is looked at once.
    """

    def __init__(self, stop_strings: Sequence[str], include: bool = False) -> None:
        """`include` leaves the stop string in the text. Strings must not be empty (SamplingParams refuses that)."""
        self._stops = tuple(sorted(stop_strings, key=len, reverse=True))
        self._borders = tuple(_border_lengths(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._include = include
        self._held = ""
        self._found: str | None = None

    def feed(self, delta: str) -> tuple[str, str | None]:
        """New text in; out: the text that may be shown, and the stop string if it has been found.

        After a stop string nothing more comes out.
        """
        if self._found is not None:
            return "", self._found
        text = self._held + delta
        for end, char in enumerate(delta, start=len(self._held) + 1):
            for index, stop in enumerate(self._stops):
                self._matched[index] = self._step(index, char)
                if self._matched[index] == len(stop) and self._found is None:
                    self._found = stop
            if self._found is not None:
                self._held = ""
                return text[: end if self._include else end - len(self._found)], self._found
        shown = len(text) - max(self._matched, default=0)
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """The text held back, when no more comes."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _step(self, index: int, char: str) -> int:
        """How many characters of the stop string the text matches at its end, after one more."""
        stop, borders, matched = self._stops[index], self._borders[index], self._matched[index]
        while matched and stop[matched] != char:
            matched = borders[matched - 1]
        return matched + (stop[matched] == char)


def _border_lengths(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for end in range(1, len(stop)):
        while length and stop[length] != stop[end]:
            length = borders[length - 1]
        length += stop[length] == stop[end]
        borders[end] = length
    return borders
