"""How models write calls. One `Syntax` says it for the grammar that a model is held to and for the parser."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ostinato.sampling.grammar import JSON_OPTIONS


class Function(NamedTuple):
    """What may be called. `parameters` is the JSON schema of its arguments, which are an object."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Syntax:
    """A text is free text, or calls: `first` NAME `between` ARGUMENTS `closing`, then `following` NAME ... for each
    further one, and `last` when no more comes.

    `trigger` is how `first` begins: free text that comes to it goes on as a call. With `after_text` that may be
    anywhere in the text, otherwise only at its beginning; free text is whatever does not begin with it. Without `text`
    there are only calls. `tags` are the parts of it that a model may have as tokens of their own.
    """

    trigger: str
    first: str
    between: str
    closing: str
    following: str
    last: str = ""
    text: bool = True
    after_text: bool = False
    tags: tuple[str, ...] = ()

    def grammar(
        self,
        functions: Sequence[Function],
        *,
        parallel: bool,
        special: Collection[str] = (),
        answer: Mapping[str, Any] | None = None,
    ) -> str:
        """In Lark's notation as llguidance reads it. `parallel` allows several calls, `special` are those of the tags,
        and of `THOUGHTS`, that are tokens of their own in the model: the library finds such tokens in no text. `answer`
        is a schema that stands for free text."""

        def literal(text: str) -> str:
            parts = re.split("|".join(f"({re.escape(tag)})" for tag in special), text) if special else [text]
            return " ".join(part if part in special else json.dumps(part) for part in parts if part)

        first = literal(self.first)
        if not self.text:
            start, rules = "", []
        elif answer is not None:
            start, rules = "answer | ", [f"answer: {_json(answer)}"]
        elif self.after_text:
            thoughts = [tag for tag in THOUGHTS if tag in special]
            start, rules = "TEXT? | ", ["TEXT: /(.|\\n)+/", "ANY: /(.|\\n)*/"]
            if self.trigger in special:
                rules.append(f"trigger: TEXT? {self.trigger}")
            else:
                rules.append(f"trigger[lazy]: ANY {literal(self.trigger)}")
            first = f"trigger {literal(self.first.removeprefix(self.trigger))}"
            if thoughts:
                rules.append(f"thoughts: (TEXT? ({' | '.join(thoughts)}))*")
                start, first = "thoughts TEXT? | ", f"thoughts {first}"
        else:
            start, rules = "TEXT? | ", [f"TEXT: /[^{self.trigger}](.|\\n)*/"]
        bodies = [f"{literal(one.name + self.between)} {_json(one.parameters)}" for one in functions]
        rules.append(f"call: ({' | '.join(bodies)}) {literal(self.closing)}")
        if parallel:
            rules.append(f"more: {literal(self.following)} call")
        more = "more* " if parallel else ""
        return "\n".join(["%llguidance {}", f"start: {start}{first} call {more}{literal(self.last)}", *rules])

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """The text of (name, arguments as JSON) pairs."""
        bodies = [name + self.between + arguments + self.closing for name, arguments in calls]
        return self.first + self.following.join(bodies) + self.last


HERMES = Syntax(
    trigger="<tool_call>",
    first='<tool_call>\n{"name": "',
    between='", "arguments": ',
    closing="}\n</tool_call>",
    following='\n<tool_call>\n{"name": "',
    after_text=True,
    tags=("<tool_call>", "</tool_call>"),
)
"""Hermes, Qwen2.5, Qwen3."""

LLAMA3_JSON = Syntax(
    trigger="{", first='{"name": "', between='", "parameters": ', closing="}", following='; {"name": "'
)
"""Llama 3.1 and later."""

ARRAY = Syntax(
    trigger="[",
    first='[{"name": "',
    between='", "parameters": ',
    closing="}",
    following=', {"name": "',
    last="]",
    text=False,
)
"""Of any model where a call is required: one JSON array."""

THOUGHTS = ("<think>", "</think>")
"""Around what a model thinks, which is free text too."""

SYNTAXES = {"hermes": HERMES, "llama3_json": LLAMA3_JSON}
"""By the names that vLLM gives its parsers."""


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({"x-guidance": JSON_OPTIONS} | dict(schema))
