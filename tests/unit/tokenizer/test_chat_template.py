"""Chat templates: the convention, the sandbox, the errors. Agreement with transformers is in test_hf_folder.py."""

from __future__ import annotations

import re

import pytest

from ostinato.errors import ConfigError
from ostinato.tokenizer.chat_template import ChatTemplate

MESSAGES = [
    {"role": "user", "content": "Grüße <b>"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "x"},
]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, **variables)  # type: ignore[arg-type]


def test_convention() -> None:
    assert render("{{ bos_token }}{{ messages | length }}") == "<s>3"
    assert (
        render(
            "{% for m in messages %}\n    {% if loop.index == 2 %}{% break %}{% endif %}\n{{ m.role }}\n{% endfor %}\n"
        )
        == "user\n"
    )
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Grüße <b>"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert re.fullmatch(r"\d{4}-\d\d", render("{{ strftime_now('%Y-%m') }}"))
    assert render("a{% generation %}b{{ messages[1].content }}{% endgeneration %}c") == "abokc"
    assert render("{{ tools is none }}{{ add_generation_prompt }}") == "TrueTrue"
    assert (
        render("{{ enable_thinking }}{{ add_generation_prompt }}", enable_thinking=False, add_generation_prompt=False)
        == "FalseFalse"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 3 }}", "cannot render these 3 messages"),
        ("{{ nothing.at.all }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "cannot render"),
    ],
)
def test_refusals(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render(source)


def test_broken_template() -> None:
    with pytest.raises(ConfigError, match="chat template, line 2"):
        ChatTemplate("a\n{% if %}", {})
