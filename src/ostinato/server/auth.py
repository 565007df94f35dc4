"""API keys, as `Authorization: Bearer KEY`."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ostinato.server.errors import APIError

_OPEN = ("/health", "/version", "/metrics", "/docs", "/openapi.json", "/")
"""For probes, scrapers and browsers, which send no key. Nothing there runs the model or tells what anybody asked."""

_OPEN_BELOW = "/static/"


class RequireKey:
    """ASGI middleware: 401 for every other path without one of `keys`.

    Digests of equal length are compared in constant time, and all of them, so the time tells nothing about a key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]) or self._allows(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = APIError(
            401,
            "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _allows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))  # headers are bytes, which is how they were decoded
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _is_open(path: str) -> bool:
    return path in _OPEN or path.startswith(_OPEN_BELOW)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
