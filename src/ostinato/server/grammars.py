"""Compiles the structure of the answers of one call; what is wrong with it is told with the field that asked for it."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.errors import ConfigError
from ostinato.request import SamplingParams, StructuredOutputsParams, TokenGrammar
from ostinato.server.errors import APIError
from ostinato.server.serving import Serving
from ostinato.server.structure import Structure
from ostinato.server.tools.syntax import Function


async def grammars(
    serving: Serving,
    params: SamplingParams,
    structure: Structure | None,
    count: int,
    functions: Sequence[Function] = (),
) -> list[TokenGrammar | None]:
    """One for each of `count` answers. `structure` is that of `params`, and `functions` are those that it may call.

    Raises APIError, and what `AsyncEngine.compile_grammars` raises for other reasons than the structure.
    """
    try:
        return await serving.engine.compile_grammars(params, count)
    except ConfigError as error:
        if structure is None or error.field != "structured_outputs":
            raise
        for number, one in enumerate(functions):  # one of these schemas, or all together
            alone = SamplingParams(structured_outputs=StructuredOutputsParams(json=dict(one.parameters)))
            try:
                await serving.engine.compile_grammars(alone, 1)
            except ConfigError as cause:
                raise _named(cause, f"tools[{number}].function.parameters") from error
        raise _named(error, structure.field) from error


def _named(error: ConfigError, field: str) -> APIError:
    message = str(error).replace("structured_outputs", field, 1)[:_LONGEST]
    return APIError(400, message, param=field, code="invalid_value")


_LONGEST = 1000
"""Characters of a message: the library quotes what it was given."""
