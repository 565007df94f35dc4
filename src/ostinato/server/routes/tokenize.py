"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from ostinato.errors import ConfigError
from ostinato.server.body import read_body
from ostinato.server.errors import APIError
from ostinato.server.openapi import operation
from ostinato.server.prompts import chat_prompt
from ostinato.server.responses import Detokenized, Tokenized, encode
from ostinato.server.schema import DetokenizeRequest, TokenizeRequest
from ostinato.server.serving import Serving
from ostinato.tokenizer.tokenizer import Tokenizer


def add(app: FastAPI, serving: Serving) -> None:
    @app.post("/tokenize", **operation(Tokenized, body=TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text, or of a conversation through the chat template."""
        body = await read_body(request, TokenizeRequest, serving.max_body_bytes)
        serving.check_model(body.model)
        tokenizer = _tokenizer(serving)
        if (body.prompt is None) == (body.messages is None):
            raise APIError(400, "give either prompt or messages", param="prompt", code="invalid_value")
        if body.messages is not None:
            prompt = await chat_prompt(
                serving,
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                template_variables=body.chat_template_kwargs,
            )
            token_ids = prompt.token_ids
        else:
            text, special = body.prompt or "", body.add_special_tokens is not False
            token_ids = await serving.aside(lambda: tokenizer.encode(text, add_special_tokens=special), len(text))
        strings = [tokenizer.id_to_token(token) or "" for token in token_ids] if body.return_token_strs else None
        limit = serving.engine.info.stats.max_model_len
        return Response(encode(Tokenized(len(token_ids), limit, token_ids, strings)), media_type="application/json")

    @app.post("/detokenize", **operation(Detokenized, body=DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens spelled out."""
        body = await read_body(request, DetokenizeRequest, serving.max_body_bytes)
        serving.check_model(body.model)
        tokenizer = _tokenizer(serving)
        text = await serving.aside(
            lambda: tokenizer.decode(body.tokens, skip_special_tokens=False), 4 * len(body.tokens)
        )
        return Response(encode(Detokenized(text)), media_type="application/json")


def _tokenizer(serving: Serving) -> Tokenizer:
    tokenizer = serving.engine.info.tokenizer
    if tokenizer is None:
        raise ConfigError("this model has no tokenizer")
    return tokenizer
