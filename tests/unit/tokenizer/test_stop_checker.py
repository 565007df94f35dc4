"""Stop strings: found wherever the text is cut, never shown in part."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ostinato.tokenizer.detokenizer import StopChecker


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    checker, shown = StopChecker(stops, include), []
    for piece in pieces:
        text, found = checker.feed(piece)
        shown.append(text)
        if found is not None:
            return shown, found
    return [*shown, checker.flush()], None


def by_search(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the match that ends first; the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4, unique=True),
    st.booleans(),
)
@example(["aaab", "aaa", "c"], ["aaaac"], False)
@example(["abc", "d"], ["abcd", "bc"], False)
def test_agrees_with_plain_search_however_the_text_is_cut(pieces: list[str], stops: list[str], include: bool) -> None:
    shown, found = run(pieces, stops, include)
    assert ("".join(shown), found) == by_search("".join(pieces), stops, include)


@given(st.lists(st.text("ab", max_size=3), max_size=10), st.text("ab", min_size=1, max_size=4))
def test_only_a_possible_beginning_is_held_back(pieces: list[str], stop: str) -> None:
    checker, given_text, shown = StopChecker([stop]), "", ""
    for piece in pieces:
        text, found = checker.feed(piece)
        if found is not None:
            return
        given_text, shown = given_text + piece, shown + text
        held = given_text[len(shown) :]
        longest = max(n for n in range(len(stop)) if given_text.endswith(stop[:n]))
        assert given_text.startswith(shown) and held == stop[:longest]


def test_streaming() -> None:
    assert run(["Hello", " wor", "ld\n", "\nUser", ": x"], ["\n\nUser:", "</s>"]) == (
        ["Hello", " wor", "ld", "", ""],
        "\n\nUser:",
    )
    assert run(["Hello", " world\n", "\nUs", "ed"], ["\n\nUser:"]) == (["Hello", " world", "", "\n\nUsed", ""], None)
    assert run(["ab", "c", "def"], ["cd"], include=True) == (["ab", "", "cd"], "cd")
    assert run(["x", "\n"], ["\n\n"]) == (["x", "", "\n"], None)


@pytest.mark.parametrize("include", [False, True])
def test_nothing_comes_after_a_stop(include: bool) -> None:
    checker = StopChecker(["."], include)
    assert checker.feed("a. b. c") == ("a." if include else "a", ".")
    assert checker.feed(" d.") == ("", ".") and checker.flush() == ""


def test_without_stop_strings_all_passes() -> None:
    assert run(["a", "", "bc"], []) == (["a", "", "bc", ""], None)
