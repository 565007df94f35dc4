"""`create_app`: the ASGI application over one engine."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware import Middleware

import ostinato
from ostinato.engine.async_engine import AsyncEngine
from ostinato.server.auth import RequireKey
from ostinato.server.errors import add_handlers
from ostinato.server.openapi import describe
from ostinato.server.routes import chat, completions, graphs, health, models, page, sleep, tokenize
from ostinato.server.serving import DEFAULT_MAX_BODY_BYTES, Serving


def create_app(
    engine: AsyncEngine,
    *,
    model_names: Sequence[str],
    api_keys: Sequence[str] = (),
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    tool_call_parser: str | None = None,
    enable_sleep_mode: bool = False,
) -> FastAPI:
    """Serves `engine`, which may still be starting, under the first of `model_names` and its other names.

    Whoever calls this starts the engine, on the event loop that the application runs on, and closes it. With
    `api_keys`, requests need one of them. `tool_call_parser` (of `tools.syntax.SYNTAXES`) lets the model decide
    whether to call a tool. `enable_sleep_mode` adds the paths that put the engine to sleep and wake it.
    """
    app = FastAPI(
        title="Ostinato",
        version=ostinato.__version__,
        middleware=[Middleware(RequireKey, keys=tuple(api_keys))] if api_keys else [],
        docs_url="/docs",
        redoc_url=None,
    )
    add_handlers(app)
    serving = Serving(engine, tuple(model_names), max_body_bytes, tool_call_parser)
    for routes in (chat, completions, models, tokenize, health, graphs, page):
        routes.add(app, serving)
    if enable_sleep_mode:
        sleep.add(app, serving)
    description = describe(app)
    app.openapi = lambda: description  # type: ignore[method-assign]
    return app
