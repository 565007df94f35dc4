"""Chat completions through the real client: the same answers as offline, in OpenAI's form."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from ostinato import LLM, SamplingParams

from .running import Running

MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Name a river."},
]
GREEDY: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}


def ask(server: Running, **options: Any) -> Any:
    return server.client().chat.completions.create(**GREEDY | options)


def offline_texts(llm: LLM, **options: Any) -> list[str]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12} | options)
    return [output.text for output in llm.chat(MESSAGES, params)[0].outputs]


@pytest.mark.usefixtures("no_leaks")
def test_an_answer(server: Running, offline: LLM) -> None:
    answer = ask(server)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == offline_texts(offline)[0]
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    num_prompt = len(offline.chat_prompt(MESSAGES)["prompt_token_ids"])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, 12)
    assert answer.usage.total_tokens == num_prompt + 12


def test_a_stream_adds_up_to_the_answer(server: Running, offline: LLM) -> None:
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    *body, last = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert body[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.role for chunk in body[1:]] == [None] * (len(body) - 1)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in body)
    assert text == offline_texts(offline)[0]
    assert [chunk.choices[0].finish_reason for chunk in body] == [None] * (len(body) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in body)
    assert last.choices == []
    assert last.usage.completion_tokens == 12


def test_without_asking_a_stream_has_no_usage(server: Running) -> None:
    with server.client().chat.completions.with_streaming_response.create(**GREEDY, stream=True) as response:
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert not any("usage" in line for line in lines)


def test_several_answers_differ_and_repeat(server: Running, offline: LLM) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 11, "temperature": 1.0}
    expected = offline_texts(offline, **options)
    assert len(set(expected)) == 3
    answer = ask(server, **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == expected
    assert answer.usage.completion_tokens == 36
    assert answer.usage.prompt_tokens == ask(server).usage.prompt_tokens
    texts = ["", "", ""]
    for chunk in ask(server, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == expected


def test_stop_strings_and_where_they_end(server: Running, offline: LLM) -> None:
    (whole,) = offline_texts(offline, max_tokens=30)
    stop = whole[9:12]
    cut = whole[: whole.index(stop)]
    answer = ask(server, max_tokens=30, stop=["never in it", stop])
    assert answer.choices[0].message.content == cut
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop
    kept = ask(server, max_tokens=30, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == cut + stop
    streamed = ask(server, max_tokens=30, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == cut


def test_logprobs(server: Running, offline: LLM) -> None:
    expected = offline.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=12, logprobs=3))[0].outputs[0]
    assert expected.logprobs is not None
    answer = ask(server, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == 12
    for entry, token_id, table in zip(content, expected.token_ids, expected.logprobs, strict=True):
        assert entry.logprob == pytest.approx(table[token_id].logprob, abs=1e-5)
        assert bytes(entry.bytes) == bytes([token_id])
        assert len(entry.top_logprobs) == 3
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert entry.token == entry.top_logprobs[0].token  # greedy
    streamed = [
        entry
        for chunk in ask(server, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == content
    assert ask(server, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    # half of a character has no text of its own
    assert any(entry.token.startswith("bytes:\\x") for entry in content) == any(i > 127 for i in expected.token_ids)


def test_parts_of_text_and_template_variables(server: Running) -> None:
    client = server.client()
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    as_parts = server.post("/tokenize", {"messages": parts}).json()["tokens"]
    assert bytes(as_parts).decode() == "[user]a\nb[assistant]"
    assert client.chat.completions.create(model="tiny", messages=parts, max_tokens=1).usage
    named = server.post("/tokenize", {"messages": parts, "chat_template_kwargs": {"name": "bot"}}).json()["tokens"]
    assert bytes(named).decode() == "[user]a\nb[bot]"


def test_limits_of_an_answer(server: Running) -> None:
    """Without a limit an answer ends with the context; both names of the limit work."""
    assert ask(server, max_tokens=None, max_completion_tokens=5).usage.completion_tokens == 5
    endless = ask(server, max_tokens=None, extra_body={"ignore_eos": True})
    assert endless.usage.total_tokens == 192
    assert endless.choices[0].finish_reason == "length"


def test_vllms_fields(server: Running, offline: LLM) -> None:
    first = offline.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=12))[0].outputs[0].token_ids
    stopped = ask(server, extra_body={"stop_token_ids": [first[4]]})
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].stop_reason == first[4]
    assert stopped.usage.completion_tokens == first.index(first[4]) + 1
    later = ask(server, extra_body={"stop_token_ids": [first[4]], "min_tokens": 12})
    assert later.usage.completion_tokens == 12
    only = ask(server, temperature=1.0, extra_body={"top_k": 1})
    assert only.choices[0].message.content == offline_texts(offline)[0]
    banned = ask(server, logit_bias={str(first[0]): -100}, logprobs=True)
    assert bytes(banned.choices[0].logprobs.content[0].bytes) != bytes([first[0]])
    penalised = ask(server, extra_body={"repetition_penalty": 5.0}, presence_penalty=2.0, frequency_penalty=2.0)
    assert penalised.choices[0].message.content != offline_texts(offline)[0]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
    ],
)
def test_the_client_raises_the_field(server: Running, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, **options)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_what_asks_for_nothing_is_fine(server: Running) -> None:
    answer = ask(server, tool_choice="none", tools=[], response_format={"type": "text"}, user="me", max_tokens=1)
    assert answer.usage.completion_tokens == 1
