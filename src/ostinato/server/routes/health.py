"""`GET /health`, `/version` and `/metrics`: for those who watch the server. They need no API key."""

from __future__ import annotations

from fastapi import FastAPI, Response

import ostinato
from ostinato.engine.status import EngineState
from ostinato.server.errors import RETRY_AFTER
from ostinato.server.metrics import CONTENT_TYPE, render
from ostinato.server.openapi import operation
from ostinato.server.responses import Health, Version, encode
from ostinato.server.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    @app.get("/health", **operation(Health))
    async def health() -> Response:
        """200 when requests are served, else 503 and why not."""
        state = serving.engine.state
        body = encode(Health("ok" if state is EngineState.RUNNING else state.value))
        if state is EngineState.RUNNING:
            return Response(body, media_type="application/json")
        return Response(body, 503, RETRY_AFTER, media_type="application/json")

    @app.get("/version", **operation(Version))
    async def version() -> Response:
        """The version of Ostinato."""
        return Response(encode(Version(ostinato.__version__)), media_type="application/json")

    @app.get("/metrics", **operation(None, text=True))
    async def metrics() -> Response:
        """What the server has done, in Prometheus' text form."""
        return Response(await render(serving.engine, serving.model_name), media_type=CONTENT_TYPE)
