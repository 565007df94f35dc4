"""Prompts as token ids: from text, from ids, from conversations through the model's chat template."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from ostinato.errors import ConfigError
from ostinato.server.errors import APIError
from ostinato.server.schema import Message
from ostinato.server.serving import Serving
from ostinato.tokenizer.tokenizer import Tokenizer

_RESERVED = ("self", "messages", "add_generation_prompt", "chat_template", "tools", "documents")
"""Variables of a template that a request may not set: `chat_template` would run a template from the network."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is None where ids were given."""

    token_ids: list[int]
    text: str | None


async def text_prompts(
    serving: Serving, prompt: str | list[str] | list[int] | list[list[int]], *, add_special_tokens: bool
) -> list[Prompt]:
    """One for a text or a list of ids, several for lists of those. Raises APIError or ConfigError."""
    entries: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
    texts = [entry for entry in entries if isinstance(entry, str)]
    tokenizer = serving.engine.info.tokenizer
    if texts and tokenizer is None:
        raise ConfigError("this model has no tokenizer: send token ids", field="prompt")

    def make() -> list[Prompt]:
        found = []
        for entry in entries:
            if isinstance(entry, str):
                assert tokenizer is not None
                found.append(Prompt(_encode(serving, tokenizer, entry, add_special_tokens, "prompt"), entry))
            else:
                found.append(Prompt(entry, None))
        return found

    prompts = await serving.aside(make, sum(map(len, texts)))
    for one in prompts:
        _check_length(serving, len(one.token_ids), "prompt")
    return prompts


async def chat_prompt(
    serving: Serving,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    template_variables: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Prompt:
    """The rendered conversation. `tools` are as OpenAI writes them, which is how templates want them.

    Raises APIError or ConfigError.
    """
    tokenizer = serving.engine.info.tokenizer
    if tokenizer is None:
        raise ConfigError("this model has no tokenizer and so no chat: use /v1/completions with token ids")
    plain = [_plain(message, index) for index, message in enumerate(messages)]
    variables = dict(template_variables or {})
    for name in _RESERVED:
        if name in variables:
            raise APIError(400, f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")

    def make() -> Prompt:
        try:
            text = tokenizer.apply_chat_template(
                plain, add_generation_prompt=add_generation_prompt, tools=tools, **variables
            )
        except ConfigError as error:
            raise ConfigError(str(error), field="messages") from error
        return Prompt(_encode(serving, tokenizer, text, False, "messages"), text)

    # a template takes its time for each message, however short
    size = sum(len(message["content"] or "") + 64 for message in plain) + 512 * len(tools or ())
    prompt = await serving.aside(make, size)
    _check_length(serving, len(prompt.token_ids), "messages")
    return prompt


def _plain(message: Message, index: int) -> dict[str, Any]:
    """For the template: parts of text become lines of one text."""
    found: dict[str, Any] = {"role": message.role, **(message.model_extra or {})}
    calls = found.pop("tool_calls", None)
    if calls:  # templates ask whether there are any, or whether the name is there
        found["tool_calls"] = _plain_calls(calls, f"messages[{index}].tool_calls")
    content = message.content
    where = f"messages[{index}].content"
    if isinstance(content, list):
        lines = []
        for number, part in enumerate(content):
            kind, text = part.get("type"), part.get("text")
            if kind != "text":
                raise APIError(
                    400,
                    f"{where}[{number}] is of type {kind!r}: only text is served",
                    param=f"{where}[{number}].type",
                    code="unsupported_content",
                )
            if not isinstance(text, str):
                raise APIError(400, f"{where}[{number}].text must be text", param=f"{where}[{number}].text")
            lines.append(text)
        content = "\n".join(lines)
    if content is None and "tool_calls" not in found:
        raise APIError(400, f"{where} is missing", param=where, code="missing_required_parameter")
    return found | {"content": content}


def _plain_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Arguments as an object, where they are JSON text of one: what templates print as JSON, or go through."""
    found = []
    for number, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            place = f"{where}[{number}]"
            raise APIError(400, f"{place} must have a function with a name", param=place, code="invalid_value")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                value = from_json(arguments)
                arguments = value if isinstance(value, dict) else arguments
        found.append({**call, "function": {**function, "arguments": {} if arguments is None else arguments}})
    return found


def _encode(serving: Serving, tokenizer: Tokenizer, text: str, add_special_tokens: bool, field: str) -> list[int]:
    limit = serving.engine.info.stats.max_model_len * tokenizer.max_token_chars
    if len(text) > limit:  # not worth the time to count exactly
        raise _too_long(serving, f"{len(text)} characters, which no {limit // tokenizer.max_token_chars}", field)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _check_length(serving: Serving, num_tokens: int, field: str) -> None:
    if num_tokens >= serving.engine.info.stats.max_model_len:
        raise _too_long(serving, f"{num_tokens} tokens", field)


def _too_long(serving: Serving, what: str, field: str) -> APIError:
    limit = serving.engine.info.stats.max_model_len
    return APIError(
        400,
        f"the prompt has {what}, and this model's context is {limit} tokens, output included: shorten the prompt",
        param=field,
        code="context_length_exceeded",
    )
