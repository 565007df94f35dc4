"""Tokens that came together are told together, and nothing is lost of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ostinato.engine.output import Delta, join
from ostinato.engine.stream import Piece
from ostinato.request import Logprob
from ostinato.server.generation import joined


def delta(answer: int, number: int, *, finished: bool = False) -> Delta:
    table = {number: Logprob(-1.0, 1, None)}
    reason, stop = ("stop", "x") if finished else (None, None)
    return Delta(f"r{answer}", (number,), f"{number} ", finished, reason, stop, (table,))


def test_several_tokens_are_one() -> None:
    three = [delta(0, 5), delta(0, 6), delta(0, 7, finished=True)]
    assert join(three) == Delta(
        "r0", (5, 6, 7), "5 6 7 ", True, "stop", "x", tuple(one.logprobs[0] for one in three)
    )  # fmt: skip


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_every_answer_keeps_its_order(answers: list[int]) -> None:
    pieces = [Piece(answer, delta(answer, number)) for number, answer in enumerate(answers)]
    told = joined(pieces)
    assert [piece.answer for piece in told] == list(dict.fromkeys(answers))
    for answer, one in told:
        numbers = [number for number, other in enumerate(answers) if other == answer]
        assert one.token_ids == tuple(numbers)
        assert one.text == "".join(f"{number} " for number in numbers)
        assert [next(iter(table)) for table in one.logprobs] == numbers
        assert not one.finished
