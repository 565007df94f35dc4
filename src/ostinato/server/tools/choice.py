"""Which calls an answer may, or must, have: from `tools` and `tool_choice` to a grammar and a way to read answers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.request import StructuredOutputsParams
from ostinato.server.errors import APIError
from ostinato.server.schema import ChatRequest, NamedTool
from ostinato.server.structure import Structure
from ostinato.server.tools.syntax import ARRAY, SYNTAXES, THOUGHTS, Function, Syntax
from ostinato.tokenizer.chat_template import variables_of
from ostinato.tokenizer.tokenizer import Tokenizer

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`tools` are for the chat template. The whole answer is the arguments of the function `named`, or is read with
    `syntax`. `show_special_tokens` where that has special tokens."""

    tools: list[dict[str, Any]]
    functions: list[Function]
    structure: Structure
    syntax: Syntax | None = None
    named: str | None = None
    show_special_tokens: bool = False


def tool_choice_of(
    body: ChatRequest, structure: Structure | None, parser: str | None, tokenizer: Tokenizer | None
) -> ToolChoice | None:
    """None where nothing may be called. `structure` is what the answer has otherwise, `parser` the name of the syntax
    that the model knows. Raises APIError, with the field."""
    tools = body.tools or []
    wanted = body.tool_choice or ("auto" if tools else "none")
    if wanted == "none":
        return None
    if not tools:
        raise _wrong("tool_choice", "tool_choice needs tools")
    functions = _functions(body)
    shown = [tool.model_dump(exclude_unset=True) for tool in tools]
    parallel = body.parallel_tool_calls is not False
    if isinstance(wanted, NamedTool):
        name = wanted.function.name
        number = next((number for number, one in enumerate(functions) if one.name == name), None)
        if number is None:
            raise _wrong("tool_choice.function.name", f"tool_choice: no function of tools is called {name!r}")
        params = StructuredOutputsParams(json=dict(functions[number].parameters))
        structure = Structure(params, f"tools[{number}].function.parameters")
        return ToolChoice(shown, functions, structure, named=name)
    if wanted == "required":
        params = StructuredOutputsParams(grammar=ARRAY.grammar(functions, parallel=parallel))
        return ToolChoice(shown, functions, Structure(params, "tools"), ARRAY)
    if parser is None:
        raise _wrong(
            "tool_choice",
            "tool_choice 'auto', the default where there are tools, needs a server that was started with "
            "--enable-auto-tool-choice and --tool-call-parser",
        )
    if tokenizer is not None and not _shows_tools(tokenizer.chat_template or ""):
        raise _wrong(
            "tools",
            "this model's chat template does not know tools, so that the model would not see them: use tool_choice "
            "'required' or a named function, and describe the functions in a message",
        )
    syntax = SYNTAXES[parser]
    own = {} if tokenizer is None else _own_tokens(tokenizer, (*syntax.tags, *THOUGHTS))
    grammar = syntax.grammar(functions, parallel=parallel, special=own, answer=_answer(structure))
    params = StructuredOutputsParams(grammar=grammar)
    hidden = tokenizer is not None and any(own[tag] in tokenizer.special_ids for tag in syntax.tags if tag in own)
    return ToolChoice(shown, functions, Structure(params, "tools"), syntax, show_special_tokens=hidden)


def _functions(body: ChatRequest) -> list[Function]:
    found: dict[str, Function] = {}
    for number, tool in enumerate(body.tools or ()):
        name, parameters = tool.function.name, tool.function.parameters
        if name in found:
            raise _wrong(f"tools[{number}].function.name", f"tools: two functions are called {name!r}")
        if not parameters:
            parameters = _NO_PARAMETERS
        elif parameters.get("type", "object") != "object":
            raise _wrong(
                f"tools[{number}].function.parameters",
                f"tools[{number}].function.parameters must be a schema of type 'object'",
            )
        found[name] = Function(name, {"type": "object"} | parameters)
    return list(found.values())


def _answer(structure: Structure | None) -> dict[str, Any] | None:
    """The schema that an answer which calls nothing has."""
    if structure is None:
        return None
    if structure.params.json_object:
        return {"type": "object"}
    if isinstance(structure.params.json, dict):
        return structure.params.json
    raise _wrong(structure.field.split(".")[0], f"{structure.field} does not go with tool_choice 'auto'")


@functools.lru_cache(maxsize=4)
def _shows_tools(template: str) -> bool:
    return "tools" in variables_of(template)


def _own_tokens(tokenizer: Tokenizer, tags: Sequence[str]) -> dict[str, int]:
    """Those that are one token each, with its id."""
    ids = {tag: tokenizer.encode(tag, add_special_tokens=False) for tag in tags}
    return {tag: found[0] for tag, found in ids.items() if len(found) == 1}


def _wrong(param: str, message: str) -> APIError:
    return APIError(400, message, param=param, code="invalid_value")
