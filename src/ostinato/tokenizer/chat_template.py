"""Renders the Jinja chat templates that models ship, in a sandbox, as Hugging Face's convention has it.

The convention: blocks trimmed of their newline and leading blanks; `break` and `continue`; a `tojson` that keeps
Unicode and escapes nothing for HTML; `raise_exception(message)`; `strftime_now(format)`; and `{% generation %}` blocks,
which mark assistant text for training and mean nothing here.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ostinato.errors import ConfigError

Message = Mapping[str, Any]
"""`role`, `content`, and whatever else the template knows (`tool_calls`, `name`, ...)."""


class ChatTemplate:
    """A compiled template. `special_tokens` (`bos_token`, `eos_token`, ...) are variables that templates may use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ConfigError if `source` is not a template."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text. `variables` (such as `tools`, `enable_thinking`) go to the template as they are.

        Raises ConfigError when the template refuses the messages or cannot digest them.
        """
        context = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(context)
        except Exception as error:  # a template is someone else's program, run on a user's data
            raise ConfigError(f"chat template cannot render these {len(messages)} messages: {error}") from error


def variables_of(source: str) -> frozenset[str]:
    """Names that a template takes from outside. Raises ConfigError if `source` is not a template."""
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(source)))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`: the body as it stands."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
