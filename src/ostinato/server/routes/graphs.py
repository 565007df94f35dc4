"""`GET /graphs/...`: the engine at work, for the page at `/`. The engine's thread reads all of it, between steps."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Query, Response

from ostinato.engine.llm import LLM
from ostinato.server import live
from ostinato.server.openapi import operation
from ostinato.server.responses import encode
from ostinato.server.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    engine = serving.engine

    def reply(body: Any) -> Response:
        return Response(encode(body), media_type="application/json", headers={"Cache-Control": "no-store"})

    @app.get("/graphs/state", **operation(live.GraphsState))
    async def graphs_state() -> Response:
        """The model, its recordings, and how many steps ran on each and why."""
        stats = await engine.call(LLM.stats)
        return reply(live.graphs_state(serving.model_name, stats))

    @app.get("/graphs/steps", **operation(live.GraphsSteps))
    async def graphs_steps(after: Annotated[int, Query(ge=0)] = 0) -> Response:
        """The kept steps after the one with this id, oldest first. `last` is the newest one's id, 0 without any."""
        last, steps = await engine.call(lambda llm: engine.step_log.after(after))
        return reply(live.graphs_steps(last, steps))

    @app.get("/graphs/pool", **operation(live.GraphsPool))
    async def graphs_pool() -> Response:
        """What each KV block is used for."""
        states = await engine.call(lambda llm: llm.engine.scheduler.kv.states())
        body = await serving.aside(lambda: live.graphs_pool(states), states.num_blocks)
        return reply(body)

    @app.get("/graphs/requests", **operation(live.RequestView, many=True))
    async def graphs_requests() -> Response:
        """The unfinished requests and their blocks, in the order of arrival."""
        return reply(await engine.call(live.graphs_requests))
