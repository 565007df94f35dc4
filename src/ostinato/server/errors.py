"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}` and a status.

| status | when |
|---|---|
| 400 | the request is wrong; `param` names the field |
| 401 | no or a wrong API key |
| 404 | no such path or model |
| 413, 415 | the body is too large, or is not JSON |
| 422 | the request is right, and larger than the KV pool |
| 429 | too many requests wait; `Retry-After` |
| 500 | the engine has failed, or a defect |
| 503 | the engine starts, sleeps or drains; `Retry-After` |
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from ostinato.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    OstinatoError,
    QueueFullError,
    UnavailableError,
)

RETRY_AFTER = {"Retry-After": "1"}


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class APIError(Exception):
    """What a client is told, and with which status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.detail = ErrorDetail(message, kind, param, code)

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.detail))

    def response(self) -> Response:
        return Response(self.body, self.status, self.headers, media_type="application/json")


def api_error(error: Exception) -> APIError:
    """The same error for a client. What nobody expected stays inside: its text is for the log alone."""
    message = str(error)
    match error:
        case APIError():
            return error
        case QueueFullError():
            return APIError(429, message, kind="rate_limit_error", code="queue_full", headers=RETRY_AFTER)
        case CapacityError():
            return APIError(422, message, code="request_too_large")
        case ConfigError():
            return APIError(400, message.removeprefix("SamplingParams."), param=error.field, code="invalid_value")
        case EngineDeadError():
            return APIError(500, message, kind="server_error", code="engine_dead")
        case UnavailableError():
            return APIError(503, message, kind="server_error", code="unavailable", headers=RETRY_AFTER)
        case OstinatoError():
            return APIError(500, message, kind="server_error")
        case RequestValidationError():  # of parameters in the URL; `read_body` sees to bodies
            first = error.errors()[0]
            name = str(first["loc"][-1])
            return APIError(400, f"{name}: {first['msg']}", param=name, code="invalid_value")
        case HTTPException():
            code = "not_found" if error.status_code == 404 else None
            return APIError(error.status_code, str(error.detail), code=code, headers=error.headers)
    return APIError(500, "internal server error", kind="server_error")


def add_handlers(app: FastAPI) -> None:
    """Every error of every path leaves as an OpenAI error body."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            return APIError(404, f"there is no {request.method} {request.url.path}", code="not_found").response()
        return api_error(error).response()

    for kind in (APIError, OstinatoError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
