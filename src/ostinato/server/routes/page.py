"""`GET /`: the page that shows the graphs at work, from files of the package alone."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from ostinato.server.errors import APIError
from ostinato.server.serving import Serving

STATIC = Path(__file__).parents[1] / "static"


def add(app: FastAPI, serving: Serving) -> None:
    app.mount("/static", StaticFiles(directory=STATIC, check_dir=False), name="static")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        index = STATIC / "index.html"
        if not index.is_file():
            raise APIError(404, "this installation has no page; the API is under /v1, its description at /docs")
        return FileResponse(index, media_type="text/html", headers={"Cache-Control": "no-cache"})
