"""`POST /sleep`, `POST /wake_up` and `GET /is_sleeping`, as vLLM has them. Only with `enable_sleep_mode`.

While the engine sleeps, new requests get 503, and open ones wait.
"""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import FastAPI, Query, Response

from ostinato.engine.llm import LLM
from ostinato.engine.status import EngineState, refusal
from ostinato.errors import CapacityError
from ostinato.server.errors import RETRY_AFTER, APIError
from ostinato.server.openapi import operation
from ostinato.server.responses import Sleeping, encode
from ostinato.server.serving import Serving

logger = logging.getLogger("ostinato")


def add(app: FastAPI, serving: Serving) -> None:
    engine = serving.engine

    @app.post("/sleep", **operation(None))
    async def sleep(level: Annotated[int, Query()] = 1) -> Response:
        """Gives the memory of weights and KV cache back. Level 1 keeps the weights in host memory, level 2 reads them
        from the checkpoint when woken. Answers once that is done; no effect on what is away already. 503 while the
        server drains: open requests must come to their ends."""
        if engine.state is EngineState.DRAINING:
            raise refusal(engine.state)
        await engine.call(lambda llm: llm.sleep(level))
        logger.info("asleep, level %d", level)
        return Response()

    @app.post("/wake_up", **operation(None))
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """Takes back what `tags` name, `weights` or `kv_cache` or both; without them, all. Nothing runs until both are
        there. 503 where the device has no room any more: the engine goes on sleeping, and it can be tried again."""
        try:
            await engine.call(lambda llm: llm.wake_up(tags))
        except CapacityError as error:
            raise APIError(503, str(error), kind="server_error", code="out_of_memory", headers=RETRY_AFTER) from error
        logger.info("woken: %s", ", ".join(tags or ["all"]))
        return Response()

    @app.get("/is_sleeping", **operation(Sleeping))
    async def is_sleeping() -> Response:
        """Whether anything that a step needs is missing."""
        body = encode(Sleeping(await engine.call(LLM.is_sleeping)))
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})
