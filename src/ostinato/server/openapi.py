"""The API's description. Bodies are read by `read_body` and written with msgspec, so schemas are added by hand."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

import ostinato
from ostinato.server import live, responses, schema
from ostinato.server.errors import ErrorBody

_REF = "#/components/schemas/"
_REQUESTS = (schema.ChatRequest, schema.CompletionRequest, schema.TokenizeRequest, schema.DetokenizeRequest)
_ANSWERS = (
    ErrorBody,
    responses.ChatCompletion,
    responses.ChatChunk,
    responses.Completion,
    responses.ModelList,
    responses.ModelCard,
    responses.Tokenized,
    responses.Detokenized,
    responses.Health,
    responses.Version,
    responses.Sleeping,
    live.GraphsState,
    live.GraphsSteps,
    live.GraphsPool,
    live.RequestView,
)
_ERRORS = {
    400: "the request is wrong; `param` names the field",
    401: "the API key is missing or wrong",
    404: "there is no such path or model",
    413: "the body is too large",
    415: "the body is not JSON",
    422: "the request is larger than the KV pool",
    429: "too many requests wait; see Retry-After",
    500: "the engine has failed",
    503: "the engine starts, sleeps or drains; see Retry-After",
}


def operation(
    answer: type[msgspec.Struct] | None,
    *,
    many: bool = False,
    stream: type[msgspec.Struct] | None = None,
    text: bool = False,
    body: type[schema.Body] | None = None,
) -> dict[str, Any]:
    """Arguments for a route: the JSON that it answers with (`many` in an array), the chunks of a `stream` where the
    client asks for one, or plain `text`; and the `body` that it takes."""
    content: dict[str, Any] = {}
    if answer is not None:
        shape = _reference(answer)
        content["application/json"] = {"schema": {"type": "array", "items": shape} if many else shape}
    if stream is not None:
        content["text/event-stream"] = {"itemSchema": _reference(stream)}
    if text:
        content["text/plain"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": _reference(ErrorBody)}}
    found: dict[str, Any] = {
        "response_class": Response,  # so that nothing is added to the content below
        "responses": {200: {"description": "the answer", "content": content}}
        | {status: {"description": meaning, "content": error} for status, meaning in _ERRORS.items()},
    }
    if body is not None:
        content = {"application/json": {"schema": _reference(body)}}
        found["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return found


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _REF + kind.__name__}


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole description."""
    found = get_openapi(title="Ostinato", version=ostinato.__version__, routes=app.routes)
    _, definitions = models_json_schema([(one, "validation") for one in _REQUESTS], ref_template=_REF + "{model}")
    _, components = msgspec.json.schema_components(_ANSWERS, ref_template=_REF + "{name}")
    found.setdefault("components", {})["schemas"] = definitions["$defs"] | components
    return found
