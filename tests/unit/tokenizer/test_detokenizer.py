"""Incremental detokenisation: the pieces are the whole, and no piece shows half a character."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_tokenizers import byte_fallback, byte_level
from tokenizers import pre_tokenizers

from ostinato.tokenizer.detokenizer import IncrementalDetokenizer, token_bytes
from ostinato.tokenizer.tokenizer import Tokenizer

BYTES = Tokenizer(byte_level())
PIECES = Tokenizer(byte_fallback())
PADDED_VOCAB = BYTES.vocab_size + 7  # models have more rows than the tokenizer has tokens


def stream(tokenizer: Tokenizer, ids: list[int], **options: object) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)  # type: ignore[arg-type]
    pieces = [detokenizer.append(token_id) for token_id in ids]
    pieces.append(detokenizer.flush())
    return pieces


@given(st.lists(st.integers(0, PADDED_VOCAB - 1), max_size=200), st.booleans())
def test_random_ids_of_a_byte_level_vocabulary(ids: list[int], skip: bool) -> None:
    pieces = stream(BYTES, ids, skip_special_tokens=skip)
    assert "".join(pieces) == BYTES.decode(ids, skip_special_tokens=skip)


@given(st.binary(max_size=60))
@example(b"\xf0\x9f\x98")
@example(b"\xe2\xe2\x82\xac\xff\xf0\x9f\x8e\x89\xc0\xaf\xed\xa0\x80")
def test_any_bytes_one_token_each(raw: bytes) -> None:
    spelled = {token_bytes(char): char for char in pre_tokenizers.ByteLevel.alphabet()}
    assert len(spelled) == 256
    ids = [BYTES._backend.token_to_id(spelled[bytes([byte])]) for byte in raw]
    pieces = stream(BYTES, ids)
    assert "".join(pieces) == raw.decode("utf-8", errors="replace") == BYTES.decode(ids)


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "byte-fallback"])
@given(text=st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=60))
@example(text=" the  tea 🎉🎉 日本\n\nthe ")
def test_text_never_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces)


def test_a_character_waits_for_its_last_byte() -> None:
    party = [PIECES._backend.token_to_id(f"<0x{byte:02X}>") for byte in "🎉".encode()]
    the = PIECES.encode("the")[0]
    assert stream(PIECES, [the, *party, the]) == ["the", "", "", "", "🎉", " the", ""]
    assert stream(PIECES, [the, *party[:2]]) == ["the", "", "", "\ufffd\ufffd"]


def test_only_texts_of_whole_characters_are_remembered() -> None:
    """A byte that ends a character, and one that begins it, have no text of their own; what follows them has."""
    spelled = {token_bytes(char): char for char in pre_tokenizers.ByteLevel.alphabet()}
    tokenizer = Tokenizer(byte_level())
    first, last, letter = (tokenizer._backend.token_to_id(spelled[byte]) for byte in (b"\xc3", b"\xa9", b"e"))
    assert stream(tokenizer, [first, last, letter]) == ["", "é", "e", ""]
    assert tokenizer.whole_texts == {letter: "e"}
    assert stream(tokenizer, [letter, last, first, letter]) == ["e", "\ufffd", "", "\ufffde", ""]
    assert stream(tokenizer, [first, last, letter, first, last]) == ["", "é", "e", "", "é", ""]


def test_the_first_blank_is_kept_after_a_prompt() -> None:
    the = PIECES.encode("the")[0]
    assert stream(PIECES, [the, the]) == ["the", " the", ""]
    assert stream(PIECES, [the, the], context_ids=PIECES.encode("a hint the", add_special_tokens=False)) == [
        " the",
        " the",
        "",
    ]


def test_special_tokens() -> None:
    ids = [0, *BYTES.encode("the cat"), 2]
    assert "".join(stream(BYTES, ids)) == "the cat"
    assert "".join(stream(BYTES, ids, skip_special_tokens=False)) == "<s>the cat<|end|>"
    think = BYTES.encode("<think>")
    assert len(think) == 1 and "".join(stream(BYTES, think)) == "<think>"


def test_endless_broken_bytes_come_out_and_the_window_stays_short() -> None:
    lone = PIECES._backend.token_to_id("<0xFF>")
    detokenizer = IncrementalDetokenizer(PIECES)
    pieces = [detokenizer.append(lone) for _ in range(500)]
    assert "".join(pieces) + detokenizer.flush() == "\ufffd" * 500
    assert sum(bool(piece) for piece in pieces) >= 10
