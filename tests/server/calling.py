"""Functions to call, a random model whose template shows them, and what a server's answer calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..e2e.models import TinyModel, build_tiny, write_tokenizer
from .running import Running

TEMPLATE = (
    "{% if tools %}[tools]{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] or '' }}"
    "{% if 'tool_calls' in message %}{% for call in message['tool_calls'] %}"
    "<{{ call['function']['name'] }}:"
    "{% for key, value in call['function']['arguments'] | items %}{{ key }}={{ value }},"
    "{% endfor %}>{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
OPEN, CLOSE = 158, 159
"""Ids of `<tool_call>` and `</tool_call>`."""

USER: Any = [{"role": "user", "content": "Weather?"}]


def tool(name: str, **parameters: Any) -> Any:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def numbers(name: str, *keys: str) -> Any:
    return tool(
        name,
        type="object",
        properties={key: {"$ref": "#/$defs/number"} for key in keys},
        required=list(keys),
        additionalProperties=False,
        **{"$defs": {"number": {"enum": [1, 22, 333]}}},
    )


TOOLS = [numbers("add", "a", "b"), numbers("go-to", "place"), {"type": "function", "function": {"name": "stop"}}]
KEYS = {"add": {"a", "b"}, "go-to": {"place"}, "stop": set()}


def build(folder: Path, special: bool = False, **overrides: Any) -> TinyModel:
    """The tags are tokens: as in Qwen, or special ones. `overrides` are config fields."""
    fields = {"vocab_size": 160, "max_position_embeddings": 1024, **overrides}
    model = build_tiny(folder, "Llama", tokenizer=True, **fields)
    write_tokenizer(folder, OPEN)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for number, tag in ((OPEN, "<tool_call>"), (CLOSE, "</tool_call>")):
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        tokenizer["added_tokens"].append({"id": number, "content": tag, "special": special, **plain})
    path.write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return model


def ask(server: Running, **options: Any) -> Any:
    given = {"model": "tiny", "messages": USER, "tools": TOOLS, "max_tokens": 300, "seed": 3} | options
    return server.client().chat.completions.create(**given)


def check(name: str, arguments: str) -> None:
    """The arguments are JSON that fits the schema of one of `TOOLS`."""
    said = json.loads(arguments)
    assert set(said) == KEYS[name]
    assert all(value in (1, 22, 333) for value in said.values())


def added_up(chunks: Any, index: int = 0) -> tuple[str | None, list[tuple[str, str]], str | None]:
    """Content, calls and the reason of a stream's answer, each chunk looked at."""
    content: str | None = None
    calls: list[tuple[str, str]] = []
    ids: list[str] = []
    reason = None
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            assert reason is None, "more after the end"
            if choice.delta.content is not None:
                content = (content or "") + choice.delta.content
            for call in choice.delta.tool_calls or ():
                if call.index == len(calls):
                    assert call.type == "function" and call.function.name
                    ids.append(call.id)
                    calls.append((call.function.name, call.function.arguments))
                else:
                    assert call.index == len(calls) - 1
                    assert call.id is None and call.function.name is None
                    calls[-1] = (calls[-1][0], calls[-1][1] + call.function.arguments)
            reason = choice.finish_reason
    assert len(set(ids)) == len(ids)
    return content, calls, reason


def of_message(choice: Any) -> tuple[str | None, list[tuple[str, str]], str | None]:
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.message.content, calls, choice.finish_reason
