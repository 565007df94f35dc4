"""Tokenizers from Hugging Face folders, with transformers as the oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_tokenizers import byte_fallback, byte_level, save

from ostinato.errors import ConfigError
from ostinato.tokenizer.hf_folder import tokenizer_from_folder
from ostinato.tokenizer.tokenizer import Tokenizer

TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {% generation %}
<|{{ message.role }}|>
{{ message | tojson }}
    {% endgeneration %}
{%- endfor %}
{% if tools %}
{{ tools | tojson(indent=2) }}
{% endif %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""
TEXTS = ["", "the cat", " the  mat\n\n1234 ½", "naïve cafe\u0301 🎉 <s>x</s> <think>", "→é→ \x00\x7f"]


def load(folder: Path, **configs: dict[str, object]) -> Tokenizer:
    tokenizer = tokenizer_from_folder(folder, **configs)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("kind", ["byte-level", "byte-level with bos", "byte-fallback"])
def test_ids_text_and_chat_agree_with_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import PreTrainedTokenizerFast

    backend = byte_fallback() if kind == "byte-fallback" else byte_level(bos="bos" in kind)
    save(tmp_path, backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    ours, theirs = load(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, {theirs.eos_token_id})
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    messages = [{"role": role, "content": f"<é {role}>"} for role in ("system", "user", "assistant")]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"é": 1}}}]
    for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False, "tools": tools}):
        assert ours.apply_chat_template(messages, **options) == theirs.apply_chat_template(
            messages, tokenize=False, **options
        )


def test_where_eos_ids_come_from(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), eos_token={"content": "</s>", "lstrip": False})
    assert load(tmp_path).eos_token_ids == {1}
    assert load(tmp_path, config={"eos_token_id": 7}).eos_token_ids == {1}
    assert load(tmp_path, generation_config={"eos_token_id": [2, 9]}).eos_token_ids == {1, 2, 9}
    assert load(tmp_path, generation_config={"eos_token_id": 2}).eos_token_ids == {1, 2}
    save(tmp_path, byte_level())
    assert load(tmp_path, config={"eos_token_id": [7], "bos_token_id": 0}).eos_token_ids == {7}
    assert load(tmp_path, config={"bos_token_id": 0}).bos_token_id == 0
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|end|>"}')
    assert load(tmp_path).eos_token_ids == {2}


def test_where_the_chat_template_comes_from(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    with pytest.raises(ConfigError, match="no chat template: pass chat_template"):
        load(tmp_path).apply_chat_template([])
    assert load(tmp_path).apply_chat_template([], chat_template="{{ messages | length }}!") == "0!"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    save(tmp_path, byte_level(), chat_template=several)
    assert load(tmp_path).apply_chat_template([]) == "plain"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load(tmp_path).apply_chat_template([]) == "file"
    assert load(tmp_path).chat_template == "file"


def test_tokens_listed_in_the_config_only(tmp_path: Path) -> None:
    backend = byte_level()
    last = backend.get_vocab_size()
    listed = {
        str(last): {"content": "<extra>", "special": True},
        str(last + 1): {"content": "<tool>", "special": False},
        "0": {"content": "<s>", "special": True},
    }
    save(tmp_path, backend, added_tokens_decoder=listed)
    tokenizer = load(tmp_path)
    assert tokenizer.encode("<extra><tool>") == [last, last + 1] and tokenizer.vocab_size == last + 2
    assert tokenizer.decode([last, last + 1]) == "<tool>" and last in tokenizer.special_ids
    save(tmp_path, backend, added_tokens_decoder={"5000": {"content": "<far>"}})
    with pytest.raises(ConfigError, match=f"'<far>' as id 5000, but the next free id in tokenizer.json is {last}"):
        load(tmp_path)


def test_saved_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    save(tmp_path, backend)
    assert load(tmp_path).encode("t h e c a t") == byte_level().encode("t h e c a t").ids


def test_other_formats_and_broken_files(tmp_path: Path) -> None:
    assert tokenizer_from_folder(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has tokenizer\.model but no tokenizer\.json"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: is not a tokenizer"):
        tokenizer_from_folder(tmp_path)
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="an object was expected"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(ConfigError, match="chat template, line 1"):
        tokenizer_from_folder(tmp_path)


def test_text_that_is_no_unicode() -> None:
    with pytest.raises(ConfigError, match="cannot be tokenized"):
        Tokenizer(byte_level()).encode("a\ud800b")
