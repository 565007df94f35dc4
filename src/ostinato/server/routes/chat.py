"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request, Response

from ostinato.engine.stream import Submission
from ostinato.server.body import read_body
from ostinato.server.chat_form import ChatForm
from ostinato.server.errors import APIError
from ostinato.server.generation import EventStream, whole
from ostinato.server.grammars import grammars
from ostinato.server.logprobs import Spelling
from ostinato.server.openapi import operation
from ostinato.server.prompts import chat_prompt
from ostinato.server.responses import ChatChunk, ChatCompletion
from ostinato.server.sampling import sampling_params
from ostinato.server.schema import ChatRequest
from ostinato.server.serving import Serving, new_id
from ostinato.server.structure import structure_of
from ostinato.server.tools.choice import tool_choice_of


def add(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/chat/completions", **operation(ChatCompletion, body=ChatRequest, stream=ChatChunk))
    async def create_chat_completion(request: Request) -> Response:
        """The model's answer to a conversation."""
        arrived = time.perf_counter()
        body = await read_body(request, ChatRequest, serving.max_body_bytes)
        serving.check_model(body.model)
        num_answers = body.n or 1
        serving.engine.check_room(num_answers)
        num_top = _num_top(body)
        structure = structure_of(body)
        choice = tool_choice_of(body, structure, serving.tool_call_parser, serving.engine.info.tokenizer)
        if choice is not None:
            structure = choice.structure
        prompt = await chat_prompt(
            serving,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            template_variables=body.chat_template_kwargs,
            tools=None if choice is None else choice.tools,
        )
        limit = body.max_completion_tokens or body.max_tokens or serving.room_after(len(prompt.token_ids))
        params = sampling_params(
            body,
            max_tokens=limit,
            logprobs=num_top,
            structured_outputs=structure and structure.params,
            show_special_tokens=choice is not None and choice.show_special_tokens,
        )
        own = await grammars(serving, params, structure, num_answers, choice.functions if choice is not None else ())
        request_id = new_id("chatcmpl")
        submissions = [
            Submission(f"{request_id}/{index}", prompt.token_ids, params.for_answer(index), body.priority, grammar)
            for index, grammar in enumerate(own)
        ]
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        form = ChatForm(
            request_id,
            body.model or serving.model_name,
            num_top=num_top,
            include_usage=include_usage,
            spelling=Spelling(serving.engine.info.tokenizer),
            choice=choice,
        )
        stream = await serving.engine.submit(submissions, arrived_at_s=arrived)
        if body.stream:
            return EventStream(stream, form, include_usage=include_usage, num_prompts=1)
        return await whole(request, stream, form, num_prompts=1)


def _num_top(body: ChatRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise APIError(400, "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
        return None
    return body.top_logprobs or 0
