"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response

from ostinato.engine.stream import Submission
from ostinato.errors import ConfigError
from ostinato.server.body import read_body
from ostinato.server.completion_form import CompletionForm
from ostinato.server.generation import EventStream, whole
from ostinato.server.grammars import grammars
from ostinato.server.logprobs import Spelling
from ostinato.server.openapi import operation
from ostinato.server.prompts import Prompt, text_prompts
from ostinato.server.responses import Completion
from ostinato.server.sampling import sampling_params
from ostinato.server.schema import CompletionRequest
from ostinato.server.serving import Serving, new_id
from ostinato.server.structure import structure_of

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for text completions."""


def add(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/completions", **operation(Completion, body=CompletionRequest, stream=Completion))
    async def create_completion(request: Request) -> Response:
        """What follows a text, or several."""
        arrived = time.perf_counter()
        body = await read_body(request, CompletionRequest, serving.max_body_bytes)
        serving.check_model(body.model)
        each = body.n or 1
        serving.engine.check_room(each)
        structure = structure_of(body)
        prompts = await text_prompts(serving, body.prompt, add_special_tokens=body.add_special_tokens)
        tokenizer = serving.engine.info.tokenizer
        params = sampling_params(
            body,
            max_tokens=body.max_tokens or DEFAULT_MAX_TOKENS,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
            detokenize=tokenizer is not None,
            structured_outputs=structure and structure.params,
        )
        own = iter(await grammars(serving, params, structure, len(prompts) * each))
        request_id = new_id("cmpl")
        submissions = [
            Submission(
                f"{request_id}/{number * each + index}",
                prompt.token_ids,
                params.for_answer(index),
                body.priority,
                next(own),
            )
            for number, prompt in enumerate(prompts)
            for index in range(each)
        ]
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        form = CompletionForm(
            request_id,
            body.model or serving.model_name,
            num_top=body.logprobs,
            include_usage=include_usage,
            spelling=Spelling(tokenizer),
            echoes=_echoes(serving, prompts, each) if body.echo else None,
        )
        stream = await serving.engine.submit(submissions, arrived_at_s=arrived)
        if body.stream:
            return EventStream(stream, form, include_usage=include_usage, num_prompts=len(prompts))
        return await whole(request, stream, form, num_prompts=len(prompts))


def _echoes(serving: Serving, prompts: Sequence[Prompt], each: int) -> list[str]:
    """The text of each answer's prompt."""
    tokenizer = serving.engine.info.tokenizer
    if tokenizer is None:
        raise ConfigError("echo needs text, and this model has no tokenizer", field="echo")
    texts = [tokenizer.decode(one.token_ids) if one.text is None else one.text for one in prompts]
    return [text for text in texts for _ in range(each)]
