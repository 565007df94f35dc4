"""Text completions, the tokenizer's endpoints and the models, through the real client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from ostinato import LLM, SamplingParams

from .running import Running

TEXTS = ["The sky", "One two three four", "x"]
IDS = [list(text.encode()) for text in TEXTS]


def offline_texts(llm: LLM, prompts: Any, **options: Any) -> list[str]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 9} | options)
    return [answer.text for output in llm.generate(prompts, params) for answer in output.outputs]


def complete(server: Running, prompt: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 9} | options
    return server.client().completions.create(prompt=prompt, **settings)


@pytest.mark.parametrize("prompt", [TEXTS[0], TEXTS, IDS[1], IDS], ids=["text", "texts", "ids", "lists of ids"])
@pytest.mark.usefixtures("no_leaks")
def test_the_shapes_of_a_prompt(server: Running, offline: LLM, prompt: Any) -> None:
    expected = offline_texts(offline, prompt)
    answer = complete(server, prompt)
    assert answer.object == "text_completion"
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    streamed = [""] * len(expected)
    reasons: list[str | None] = [None] * len(expected)
    for chunk in complete(server, prompt, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert streamed == expected
    assert reasons == [choice.finish_reason for choice in answer.choices]


def test_defaults_are_openais(server: Running) -> None:
    answer = server.client().completions.create(model="tiny", prompt="abc", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_answers_to_several_prompts(server: Running, offline: LLM) -> None:
    """Index of an answer: prompt by prompt. Each prompt's tokens count once."""
    options: dict[str, Any] = {"n": 2, "seed": 5, "temperature": 1.0}
    answer = complete(server, TEXTS, **options)
    assert [choice.text for choice in answer.choices] == offline_texts(offline, TEXTS, **options)
    assert answer.usage.prompt_tokens == sum(map(len, IDS))
    *_, last = complete(server, TEXTS, stream=True, stream_options={"include_usage": True}, **options)
    assert last.choices == []
    assert last.usage == answer.usage


def test_logprobs_and_echo(server: Running, offline: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=2)
    (output,) = offline.generate([TEXTS[1]], params)
    (expected,) = output.outputs
    assert expected.logprobs is not None
    assert output.prompt_logprobs is not None
    answer = complete(server, TEXTS[1], max_tokens=4, logprobs=2, echo=True)
    (choice,) = answer.choices
    assert choice.text == TEXTS[1] + expected.text
    told = choice.logprobs
    assert told.token_logprobs[0] is None
    assert told.top_logprobs[0] is None
    tables = [*output.prompt_logprobs[1:], *expected.logprobs]
    ids = [*IDS[1][1:], *expected.token_ids]
    values = [table[token].logprob for token, table in zip(ids, tables, strict=True) if table is not None]
    assert told.token_logprobs[1:] == pytest.approx(values, abs=1e-5)
    assert "".join(told.tokens[: len(IDS[1])]) == TEXTS[1]
    assert told.text_offset[: len(IDS[1])] == list(range(len(IDS[1])))
    assert all(len(top) >= 1 for top in told.top_logprobs[1:])
    streamed = list(complete(server, TEXTS[1], max_tokens=4, logprobs=2, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text
    values = [value for chunk in streamed for value in chunk.choices[0].logprobs.token_logprobs]
    assert values[0] is None
    assert values[1:] == pytest.approx(told.token_logprobs[1:], abs=1e-5)
    assert complete(server, IDS[0], echo=True).choices[0].text.startswith(TEXTS[0])


def test_a_cached_prefix_is_told(server: Running) -> None:
    prompt = "The same beginning, which is longer than two blocks of sixteen."
    complete(server, prompt)
    assert complete(server, prompt).usage.prompt_tokens_details.cached_tokens == 48


def test_models(server: Running) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny", "also/tiny"]
    assert client.models.retrieve("also/tiny").id == "also/tiny"
    assert complete(server, "a", model="also/tiny").model == "also/tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        complete(server, "a", model="gpt-4")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_tokenize_and_back(server: Running) -> None:
    text = "Ostinato; " * 700  # long enough to go to a thread
    told = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert told["tokens"] == list(text.encode())
    assert told["count"] == len(text)
    assert told["max_model_len"] == 192
    assert told["token_strs"][:2] == ["O", "s"]
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": text}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
