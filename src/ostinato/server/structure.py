"""From the fields that ask for a structure of the answer to the engine's parameter. Four spellings, one meaning."""

from __future__ import annotations

from typing import Any, NamedTuple

from ostinato.errors import ConfigError
from ostinato.request import StructuredOutputsParams
from ostinato.server.errors import APIError
from ostinato.server.schema import SamplingFields, StructuredOutputs

_OTHERS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
"""Of vLLM's options in `structured_outputs` those that would change the answer and are not served."""


class Structure(NamedTuple):
    """What is asked for, and the field that asks."""

    params: StructuredOutputsParams
    field: str


def structure_of(body: SamplingFields) -> Structure | None:
    """None where the answer is free. Raises APIError, with the field, for a wrong one or a second one."""
    found = []
    if body.response_format is not None:
        found += _response_format(body)
    if body.structured_outputs is not None:
        found.append(_structured_outputs(body.structured_outputs))
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{name}")
        if value is not None:
            found.append(Structure(StructuredOutputsParams(**{name: value}), f"guided_{name}"))
    if len(found) > 1:
        raise APIError(
            400,
            f"{found[1].field}: the answer has one structure, and {found[0].field} asks for another",
            param=found[1].field.split(".")[0],
            code="invalid_value",
        )
    return found[0] if found else None


def _response_format(body: SamplingFields) -> list[Structure]:
    given = body.response_format
    assert given is not None
    if given.type == "text":
        return []
    if given.type == "json_object":
        return [Structure(StructuredOutputsParams(json_object=True), "response_format")]
    if given.json_schema is None:
        raise APIError(
            400,
            "response_format.json_schema is missing",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )
    params = StructuredOutputsParams(json=given.json_schema.json_schema)
    return [Structure(params, "response_format.json_schema.schema")]


def _structured_outputs(given: StructuredOutputs) -> Structure:
    for name in _OTHERS:
        if (given.model_extra or {}).get(name) not in (None, False):
            where = f"structured_outputs.{name}"
            raise APIError(
                400, f"{where} is not supported yet: leave it out", param=where, code="unsupported_parameter"
            )
    values: dict[str, Any] = {
        "json": given.json_schema,
        "regex": given.regex,
        "choice": given.choice,
        "grammar": given.grammar,
        "json_object": given.json_object,
        "structural_tag": given.structural_tag,
    }
    names = [name for name, value in values.items() if value is not None]
    try:
        params = StructuredOutputsParams(**values)
    except ConfigError as error:
        message = str(error).replace("StructuredOutputsParams", "structured_outputs", 1)
        raise APIError(400, message, param="structured_outputs", code="invalid_value") from error
    return Structure(params, f"structured_outputs.{names[0]}")
