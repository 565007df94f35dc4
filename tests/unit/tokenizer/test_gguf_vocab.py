"""Tokenizers from GGUF metadata, compared with the tokenizers they were taken from."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level

from ostinato.errors import ConfigError
from ostinato.tokenizer.gguf_vocab import tokenizer_from_gguf
from ostinato.tokenizer.tokenizer import Tokenizer


def metadata(**changes: Any) -> dict[str, Any]:
    """What a converter writes for the tiny byte-level tokenizer; its splitting pattern is none of the known ones."""
    model = json.loads(byte_level().to_str())
    vocab = byte_level().get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    added = {token["content"]: 3 if token["special"] else 4 for token in model["added_tokens"]}
    entries = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": [added.get(token, 1) for token in tokens],
        "merges": [" ".join(merge) for merge in model["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    return {"tokenizer.ggml." + key: value for key, value in entries.items() if value is not None}


def build(**changes: Any) -> Tokenizer:
    tokenizer = tokenizer_from_gguf(metadata(**changes), "tiny.gguf")
    assert tokenizer is not None
    return tokenizer


def spelled(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text, add_special_tokens=False)]


def test_special_and_user_defined_tokens_are_found_whole() -> None:
    tokenizer, original = build(), Tokenizer(byte_level())
    for text in ("the cat<s></s><|end|>", "<think>→é→ the", "thé 日本"):
        assert tokenizer.encode(text) == original.encode(text)
    ids = tokenizer.encode("<s>the<think><|end|>")
    assert tokenizer.decode(ids) == "the<think>" and tokenizer.special_ids == {0, 1, 2}


PRE = ["gpt-2", "default", "smollm", "llama-bpe", "qwen2"]


@pytest.mark.parametrize("tokenizer", [build(pre=pre) for pre in PRE], ids=PRE)
@given(text=st.text(max_size=40))
def test_every_rule_loses_nothing(tokenizer: Tokenizer, text: str) -> None:
    # Qwen2 composes characters first.
    expected = unicodedata.normalize("NFC", text) if tokenizer.encode("e\u0301") == tokenizer.encode("é") else text
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def merged_digits(pre: str) -> list[str]:
    """Digits with merges for 12 and 123: how far does the rule let them merge?"""
    tokens = [*metadata()["tokenizer.ggml.tokens"], "12", "123", "1234"]
    merges = [*metadata()["tokenizer.ggml.merges"], "1 2", "12 3", "123 4"]
    kinds = [*metadata()["tokenizer.ggml.token_type"], 1, 1, 1]
    return spelled(build(pre=pre, tokens=tokens, merges=merges, token_type=kinds), "1234")


def test_rules_differ_on_digits() -> None:
    assert merged_digits("gpt-2") == ["1234"]
    assert merged_digits("llama-bpe") == ["123", "4"]
    assert merged_digits("qwen2") == merged_digits("smollm") == ["1", "2", "3", "4"]


def test_bos_and_eos_around_a_text() -> None:
    plain = build().encode("the cat", add_special_tokens=False)
    assert build().encode("the cat") == plain
    assert build(add_bos_token=True).encode("the cat") == [0, *plain]
    assert build(add_bos_token=True, add_eos_token=True).encode("the cat") == [0, *plain, 1]
    assert build(pre="llama-bpe").encode("the cat")[0] == 0
    assert build(pre="llama-bpe", add_bos_token=False).encode("the cat")[0] != 0
    assert build(add_bos_token=True).encode("the cat", add_special_tokens=False) == plain


def test_stop_ids_and_template() -> None:
    assert build().eos_token_ids == {1}
    assert build(eot_token_id=2).eos_token_ids == {1, 2}
    tokens = metadata() | {"tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}"}
    tokenizer = tokenizer_from_gguf(tokens, "tiny.gguf")
    assert tokenizer is not None and tokenizer.apply_chat_template([]) == "<s></s>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, r"tiny\.gguf: GGUF tokenizer model 'llama' is not supported"),
        ({"pre": "tekken"}, "by rule 'tekken', which is not supported; supported are gpt-2, default"),
        ({"pre": None}, "by rule None"),
        ({"merges": None}, r"lacks tokenizer\.ggml\.merges"),
        ({"merges": ["ab"]}, "merge 'ab' is not two tokens"),
        ({"merges": ["zq xj"]}, "do not fit together"),
        ({"token_type": [1]}, "but 1 token types"),
        ({"tokens": ["a", "a"], "token_type": [1, 1], "merges": []}, "1 tokens occur twice"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tokenizer_from_gguf(metadata(**changes), "tiny.gguf")


def test_no_tokenizer() -> None:
    assert tokenizer_from_gguf({}, "tiny.gguf") is None
