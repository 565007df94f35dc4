"""Tool calls through the real client. The model is random, and made to call by a bias; the rest is the grammar's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from ..e2e.models import TinyModel
from .calling import OPEN, TOOLS, USER, added_up, ask, build, check, of_message, tool
from .conftest import open_llm
from .running import Running, running

pytest.importorskip("llguidance", reason="llguidance is not installed")

CALL_ONCE = {str(OPEN): 100, "0": 50}
"""As a bias: the model begins a call at once, and ends when it may."""


@contextmanager
def serve(folder: Any, special: bool = False, parser: str | None = "hermes") -> Iterator[Running]:
    model = build(folder, special)
    with running(
        lambda: open_llm(model, max_model_len=1024, num_gpu_blocks_override=200), tool_call_parser=parser
    ) as server:
        yield server


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serve(tmp_path_factory.mktemp("hermes")) as server:
        num_tasks = server.num_tasks()
        yield server
        server.assert_nothing_leaked(num_tasks + 8)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serve(tmp_path_factory.mktemp("llama"), parser="llama3_json") as server:
        yield server


@pytest.mark.parametrize("parallel", [True, False])
def test_required(hermes: Running, parallel: bool) -> None:
    answer = ask(hermes, tool_choice="required", parallel_tool_calls=parallel, n=3)
    chunks = list(ask(hermes, tool_choice="required", parallel_tool_calls=parallel, n=3, stream=True))
    for choice in answer.choices:
        content, calls, reason = of_message(choice)
        assert (content, reason) == (None, "tool_calls") or (parallel and reason == "length")
        assert len(calls) == 1 or (parallel and calls)
        for name, arguments in calls if reason == "tool_calls" else calls[:-1]:
            check(name, arguments)
        assert added_up(chunks, choice.index) == (content, calls, reason)


def test_a_named_function(hermes: Running) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    choice = ask(hermes, tool_choice=named).choices[0]
    content, [(name, arguments)], reason = of_message(choice)
    assert (content, name, reason) == (None, "add", "stop")
    check(name, arguments)
    assert choice.message.tool_calls[0].id.startswith("call-")
    assert added_up(ask(hermes, tool_choice=named, stream=True)) == of_message(choice)


def test_a_named_function_without_parameters(hermes: Running) -> None:
    answer = ask(hermes, tool_choice={"type": "function", "function": {"name": "stop"}})
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {}


def test_the_model_decides_to_call(hermes: Running) -> None:
    answer = ask(hermes, logit_bias=CALL_ONCE)
    content, calls, reason = of_message(answer.choices[0])
    assert (content, reason, len(calls)) == (None, "tool_calls", 1)
    check(*calls[0])
    assert added_up(ask(hermes, logit_bias=CALL_ONCE, stream=True)) == (content, calls, reason)


def test_several_calls_and_one(hermes: Running) -> None:
    """It would go on for ever; the first calls are whole, the last one is cut short."""
    bias = {str(OPEN): 100, "0": -100}
    choice = ask(hermes, logit_bias=bias, max_tokens=400).choices[0]
    _, calls, reason = of_message(choice)
    assert reason == "length" and len(calls) > 1
    for call in calls[:-1]:
        check(*call)
    one = ask(hermes, logit_bias=bias, max_tokens=400, parallel_tool_calls=False).choices[0]
    _, calls, reason = of_message(one)
    assert (reason, len(calls)) == ("tool_calls", 1)


def test_the_model_decides_not_to_call(hermes: Running) -> None:
    """It says what it says without tools in the prompt's place."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "logit_bias": {str(OPEN): -100}}
    answer = ask(hermes, **options).choices[0]
    assert answer.message.content and answer.message.tool_calls is None
    content, calls, _ = added_up(ask(hermes, stream=True, **options))
    assert (content, calls) == (answer.message.content, [])


def test_special_tokens_as_tags(tmp_path_factory: pytest.TempPathFactory) -> None:
    with serve(tmp_path_factory.mktemp("special"), special=True) as server:
        answer = ask(server, logit_bias=CALL_ONCE)
        content, calls, reason = of_message(answer.choices[0])
        assert (content, reason, len(calls)) == (None, "tool_calls", 1)
        check(*calls[0])
        assert added_up(ask(server, logit_bias=CALL_ONCE, stream=True)) == (content, calls, reason)


def test_llama(llama: Running) -> None:
    bias = {str(ord("{")): 100, "0": 50}
    answer = ask(llama, logit_bias=bias)
    content, calls, reason = of_message(answer.choices[0])
    assert (content, reason, len(calls)) == (None, "tool_calls", 1)
    check(*calls[0])
    assert added_up(ask(llama, logit_bias=bias, stream=True)) == (content, calls, reason)
    text = ask(llama, logit_bias={str(ord("{")): -100}, max_tokens=8).choices[0].message
    assert text.content and text.tool_calls is None


def test_log_probabilities_of_calls(hermes: Running) -> None:
    answer = ask(hermes, tool_choice="required", logprobs=True, parallel_tool_calls=False)
    whole = [entry.token for entry in answer.choices[0].logprobs.content]
    assert len(whole) == answer.usage.completion_tokens
    chunks = list(ask(hermes, tool_choice="required", logprobs=True, parallel_tool_calls=False, stream=True))
    told = [chunk.choices[0].logprobs for chunk in chunks]
    assert [entry.token for each in told if each for entry in each.content] == whole


def test_a_schema_for_what_is_no_call(hermes: Running) -> None:
    """With both, an answer is a call or fits the schema."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [12, 34]}}}
    content, calls, reason = of_message(
        ask(hermes, response_format=schema, logit_bias={str(OPEN): -100, str(ord("<")): -100}).choices[0]
    )
    assert (content in ("12", "34"), calls, reason) == (True, [], "stop")
    content, calls, reason = of_message(ask(hermes, response_format=schema, logit_bias=CALL_ONCE).choices[0])
    assert (content, len(calls), reason) == (None, 1, "tool_calls")


def test_a_conversation_with_calls(hermes: Running) -> None:
    """Arguments reach the template as an object; the client's own message can be sent back as it came."""
    first = ask(hermes, tool_choice="required", parallel_tool_calls=False).choices[0].message
    call = first.tool_calls[0]
    messages = [*USER, first, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
    assert ask(hermes, messages=messages, max_tokens=2).usage.completion_tokens
    plain = [message if isinstance(message, dict) else message.model_dump() for message in messages]
    ids = hermes.post("/tokenize", {"messages": plain}).json()["tokens"]
    text = hermes.post("/detokenize", {"tokens": ids}).json()["prompt"]
    said = "".join(f"{key}={value}," for key, value in json.loads(call.function.arguments).items())
    assert text == f"[user]Weather?[assistant]<{call.function.name}:{said}>[tool]4[assistant]"


def test_what_the_template_sees(hermes: Running) -> None:
    """The tools, as they were sent; none where none may be called."""
    bare = ask(hermes, tools=openai.NOT_GIVEN, max_tokens=1).usage.prompt_tokens
    assert ask(hermes, tool_choice="none", max_tokens=1).usage.prompt_tokens == bare
    told = "[tools]" + "".join(json.dumps(one, ensure_ascii=False) for one in TOOLS)
    assert ask(hermes, max_tokens=1).usage.prompt_tokens == bare + len(told)
    assert ask(hermes, tool_choice="required", max_tokens=1).usage.prompt_tokens == bare + len(told)


def test_leaving_in_the_middle_of_a_call(hermes: Running) -> None:
    hermes.wait_idle()
    with ask(hermes, stream=True, logit_bias={str(OPEN): 100, "0": -100}, max_tokens=600) as stream:
        for chunk in stream:
            if chunk.choices[0].delta.tool_calls:
                break
    hermes.wait_idle()
    assert of_message(ask(hermes, logit_bias=CALL_ONCE).choices[0])[2] == "tool_calls"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice.function.name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[3].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [{"type": "code", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("f", type="array")]}, "tools[0].function.parameters"),
        ({"tools": [TOOLS[0], tool("f", properties={"a": {"type": "no"}})]}, "tools[1].function.parameters"),
        (
            {"tools": [tool("f", properties={"a": {"type": "no"}})], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        ({"tools": [tool("f")] * 129}, "tools"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": None}]}, "messages[0].content"),
        ({"min_tokens": 3}, "min_tokens"),
    ],
)
def test_400_names_the_field(hermes: Running, options: dict[str, Any], param: str) -> None:
    body = {"messages": USER, "tools": TOOLS, "max_tokens": 5} | options
    response = hermes.post("/v1/chat/completions", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_without_the_flag_only_the_client_decides(server: Running) -> None:
    response = server.post("/v1/chat/completions", {"messages": USER, "tools": TOOLS})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"
    assert "--enable-auto-tool-choice" in response.json()["error"]["message"]
    small = ask(server, tools=[TOOLS[2]], tool_choice="required", parallel_tool_calls=False, max_tokens=120)
    assert of_message(small.choices[0])[2] == "tool_calls"


def test_a_template_without_tools(model: TinyModel) -> None:
    with running(lambda: open_llm(model), tool_call_parser="hermes") as server:
        response = server.post("/v1/chat/completions", {"messages": USER, "tools": TOOLS})
    assert response.status_code == 400
    assert "chat template does not know tools" in response.json()["error"]["message"]
