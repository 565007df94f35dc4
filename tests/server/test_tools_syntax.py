"""Calls as models write them: found again however the text is cut, and what the grammar allows is what is found."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from ostinato.server.tools.parser import Arguments, CallBegins, CallParser, Event, Text
from ostinato.server.tools.syntax import ARRAY, HERMES, LLAMA3_JSON, THOUGHTS, Function, Syntax

from ..e2e.models import write_tokenizer

SYNTAXES = {"hermes": HERMES, "llama3_json": LLAMA3_JSON, "array": ARRAY}
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('"\\{}[]<>a\n', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('"\\}{a', max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "get_weather"]), st.dictionaries(st.text(max_size=3), ANY_JSON, max_size=3)),
    min_size=1,
    max_size=3,
)


def read(syntax: Syntax, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """The free text and the calls."""
    parser = CallParser(syntax)
    events: list[Event] = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    text, calls = "", list[tuple[str, str]]()
    for event in events:
        match event:
            case Text(more):
                assert more
                text += more
            case CallBegins(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case Arguments(index, more):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + more)
    assert parser.num_calls == len(calls)
    return text, calls


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("name", SYNTAXES)
@hypothesis.given(
    calls=CALLS,
    free=st.text("<tool_call>{ab\n", max_size=15),
    places=st.lists(st.integers(0, 1000), max_size=12),
    end=st.integers(0, 1000) | st.none(),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_any_cut_gives_the_same(
    name: str, calls: list[tuple[str, dict[str, Any]]], free: str, places: list[int], end: int | None
) -> None:
    """Whole texts give their calls; those that were cut short at least give the same in one piece and in many."""
    syntax = SYNTAXES[name]
    pairs = [(function, json.dumps(arguments)) for function, arguments in calls]
    free = free if syntax.after_text and "<tool_call>" not in free else ""
    text = free + syntax.written(pairs)
    if end is not None:
        text = text[: end % (len(text) + 1)]
    whole = read(syntax, [text])
    assert read(syntax, cut(text, places)) == whole
    assert read(syntax, list(text)) == whole
    if end is None:
        assert whole == (free, pairs)


@hypothesis.given(text=st.text('<tool_call>{"name: ,f}\n', max_size=40), places=st.lists(st.integers(0, 1000)))
def test_what_is_no_call_is_text(text: str, places: list[int]) -> None:
    hypothesis.assume('", "arguments": ' not in text)
    assert read(HERMES, cut(text, places)) == (text, [])
    assert read(LLAMA3_JSON, cut(text, places)) == (text, [])


def test_a_call_that_was_cut_short() -> None:
    text = HERMES.written([("f", '{"a": 1}'), ("g", '{"b": 2}')])
    assert read(HERMES, [text[:20]]) == (text[:20], [])
    assert read(HERMES, [text[: text.index("1}")]]) == ("", [("f", '{"a": ')])
    assert read(HERMES, [text.removesuffix("</tool_call>")])[1] == [("f", '{"a": 1}'), ("g", '{"b": 2}')]


NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FUNCTIONS = [
    Function("f", NUMBER),
    Function("go-2", {"type": "object", "properties": {}, "additionalProperties": False}),
]
ONE, TWO = [("f", '{"a": 1}')], [("f", '{"a": 1}'), ("go-2", "{}")]


class Follower:
    """Whether a grammar takes a text. Tokens are bytes, but those of the two tags where they are `special`."""

    def __init__(self, folder: Path, grammar: str, special: bool = False) -> None:
        library = pytest.importorskip("llguidance", reason="llguidance is not installed")
        write_tokenizer(folder, 256)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        self._special = special
        if special:
            template = tokenizer["added_tokens"][0]
            for number, tag in enumerate((*HERMES.tags, *THOUGHTS)):
                tokenizer["added_tokens"].append({**template, "id": 256 + number, "content": tag})
        tokens = library.LLTokenizer(json.dumps(tokenizer), n_vocab=260 if special else 256, eos_token=[0])
        self._matcher = library.LLMatcher(tokens, library.LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def takes(self, text: str) -> bool:
        matcher, ids = self._matcher.deep_copy(), list(text.encode())
        if self._special:
            tags = (*HERMES.tags, *THOUGHTS)
            parts = re.split("|".join(f"({tag})" for tag in tags), text)
            ids = [n for part in parts if part for n in ([256 + tags.index(part)] if part in tags else part.encode())]
        return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize("parallel", [True, False])
def test_the_grammar_takes_what_the_parser_finds(name: str, parallel: bool, tmp_path: Path) -> None:
    syntax = SYNTAXES[name]
    follower = Follower(tmp_path, syntax.grammar(FUNCTIONS, parallel=parallel))
    assert follower.takes(syntax.written(ONE))
    assert follower.takes(syntax.written(TWO)) is parallel
    assert not follower.takes(syntax.written([("f", '{"a": "1"}')]))
    assert not follower.takes(syntax.written([("h", "{}")]))
    assert not follower.takes(syntax.written(ONE)[:-1])
    assert follower.takes("no <call> at all") is syntax.text
    assert follower.takes("well\n" + syntax.written(ONE)) is (name != "array")  # as text, in Llama's syntax
    assert not follower.takes(syntax.written(ONE) + " and")


def test_tags_that_are_special_tokens(tmp_path: Path) -> None:
    """As in Qwen, where a model that thinks has tokens for that as well."""
    grammar = HERMES.grammar(FUNCTIONS, parallel=True, special=(*HERMES.tags, *THOUGHTS))
    follower = Follower(tmp_path, grammar, special=True)
    for before in ("", "well ", "<think>hm</think>", "<think>\nhm\n</think>\n\nwell\n"):
        assert follower.takes(before + HERMES.written(ONE))
        assert follower.takes(before + HERMES.written(TWO))
        assert follower.takes(before)
        assert not follower.takes(before + HERMES.written([("h", "{}")]))


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_a_schema_in_place_of_text(name: str, tmp_path: Path) -> None:
    syntax = SYNTAXES[name]
    follower = Follower(tmp_path, syntax.grammar(FUNCTIONS, parallel=True, answer={"type": "integer"}))
    assert follower.takes("12")
    assert follower.takes(syntax.written(TWO))
    assert not follower.takes("twelve")
