"""Reads a request's body within its limit and checks it against a schema; the error names the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json

from ostinato.server.errors import APIError
from ostinato.server.schema import Body

B = TypeVar("B", bound=Body)


async def read_body(request: Request, schema: type[B], max_bytes: int) -> B:
    """Raises APIError: 415 for another type than JSON, 413 above `max_bytes`, 400 for what does not fit the schema."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        # a page of another site may post text without asking the browser's leave; not JSON
        raise APIError(415, f"Content-Type is {kind!r}: it must be application/json", code="unsupported_media_type")
    raw = await _read(request, max_bytes)
    try:
        body = schema.model_validate_json(raw)
    except ValidationError as error:
        raise _named(error, raw) from None
    for name, value in (body.model_extra or {}).items():
        if name in schema.refused and value not in schema.refused[name]:
            raise APIError(400, f"{name} is not supported yet: leave it out", param=name, code="unsupported_parameter")
    return body


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = APIError(
        413, f"the body is larger than {max_bytes} bytes", code="body_too_large", headers={"Connection": "close"}
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def _named(error: ValidationError, raw: bytes) -> APIError:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return APIError(400, f"the body is not JSON: {first['msg']}", code="invalid_json")
    missing = first["type"] == "missing"
    path = _path(first["loc"], from_json(raw), missing)
    if missing:
        return APIError(400, f"{path} is missing", param=path, code="missing_required_parameter")
    # of a union each branch has its own complaint
    reasons = dict.fromkeys(other["msg"] for other in errors if other["loc"][:1] == first["loc"][:1])
    return APIError(400, f"{path or 'the body'}: {', or: '.join(reasons)}", param=path or None, code="invalid_value")


def _path(loc: Sequence[str | int], value: Any, missing: bool) -> str:
    """`messages[0].role`: the parts of a place that are in the body, as others name the branches of a union; and the
    last one where that is what is missing."""
    path = ""
    for part in loc:
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            path, value = f"{path}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or missing):
            path, value = f"{path}.{part}" if path else str(part), value.get(part)
        else:
            break
    return path
