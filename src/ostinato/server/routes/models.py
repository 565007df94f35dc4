"""`GET /v1/models`, and one of them."""

from __future__ import annotations

from fastapi import FastAPI, Response

from ostinato.server.errors import APIError
from ostinato.server.openapi import operation
from ostinato.server.responses import ModelCard, ModelList, encode
from ostinato.server.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    def card(name: str) -> ModelCard:
        limit = serving.engine.info.stats.max_model_len
        return ModelCard(name, serving.created, root=serving.model_name, max_model_len=limit)

    @app.get("/v1/models", **operation(ModelList))
    async def list_models() -> Response:
        """The names that the model is served under."""
        cards = [card(name) for name in serving.model_names]
        return Response(encode(ModelList(cards)), media_type="application/json")

    @app.get("/v1/models/{model:path}", **operation(ModelCard))
    async def retrieve_model(model: str) -> Response:
        """One of them."""
        if model not in serving.model_names:
            raise APIError(404, f"the model {model!r} does not exist", param="model", code="model_not_found")
        return Response(encode(card(model)), media_type="application/json")
