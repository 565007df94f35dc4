"""What a client is told when something is wrong: status, OpenAI's body, the field."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from ostinato import LLM
from ostinato.engine.status import EngineState
from ostinato.server.sampling import _OTHERWISE, _SAME_NAME
from ostinato.server.schema import ChatRequest, CompletionRequest

from ..e2e.conftest import TinyFactory
from ..e2e.conftest import tiny_model as tiny_model
from ..e2e.models import TinyModel
from .conftest import open_llm
from .running import LONGEST_S, Running, running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: Any = [{"role": "user", "content": "hello"}]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, which must have the four fields that clients read."""
    body = response.json()
    assert list(body) == ["error"], body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    found: dict[str, Any] = body["error"]
    return found


def part(kind: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [*USER, {"role": "user"}]}, "messages[1].content"),
        (CHAT, {"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": part("image_url")}, "messages[0].content[1].type"),
        (CHAT, {"messages": part("input_audio")}, "messages[0].content[1].type"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (CHAT, {"messages": USER, "temperature": "0.5"}, "temperature"),
        (CHAT, {"messages": USER, "temperature": -0.1}, "temperature"),
        (CHAT, {"messages": USER, "top_p": 0}, "top_p"),
        (CHAT, {"messages": USER, "n": 0}, "n"),
        (CHAT, {"messages": USER, "n": True}, "n"),
        (CHAT, {"messages": USER, "n": 129}, "n"),
        (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": USER, "max_completion_tokens": 1.5}, "max_completion_tokens"),
        (CHAT, {"messages": USER, "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        (CHAT, {"messages": USER, "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (CHAT, {"messages": USER, "presence_penalty": 2.1}, "presence_penalty"),
        (CHAT, {"messages": USER, "stop": [""]}, "stop"),
        (CHAT, {"messages": USER, "stop": ["x"] * 17}, "stop"),
        (CHAT, {"messages": USER, "seed": 2**63}, "seed"),
        (CHAT, {"messages": USER, "stop_token_ids": [160]}, "stop_token_ids"),
        (CHAT, {"messages": USER, "logit_bias": {"160": 1}}, "logit_bias"),
        (CHAT, {"messages": USER, "logit_bias": {"one": 1}}, "logit_bias.one"),
        (CHAT, {"messages": USER, "logit_bias": {"1": 101}}, "logit_bias.1"),
        (CHAT, {"messages": USER, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (CHAT, {"messages": USER, "chat_template": "{{ 1 }}"}, "chat_template"),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        (CHAT, {"messages": USER, "continue_final_message": True}, "continue_final_message"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": None}, "prompt"),
        (TEXT, {"prompt": ["a", 3]}, "prompt"),
        (TEXT, {"prompt": [[1], []]}, "prompt"),
        (TEXT, {"prompt": ["a"] * 129}, "prompt"),
        (TEXT, {"prompt": [1, -2]}, "prompt"),
        (TEXT, {"prompt": [1, 160]}, "prompt"),
        (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
        (TEXT, {"prompt": "a", "best_of": 2}, "best_of"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)
def test_400_names_the_field(server: Running, path: str, body: Any, param: str) -> None:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"5", b"\xff", b'{"prompt": "\\ud800"}', b'{"a":' * 5000])
def test_400_for_what_is_no_object(server: Running, raw: bytes) -> None:
    response = httpx.post(f"{server.url}{TEXT}", content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] is None


@pytest.mark.parametrize("number", ["1e400", "NaN", "-Infinity", "9" * 400])
def test_400_for_numbers_that_are_none(server: Running, number: str) -> None:
    raw = f'{{"prompt": "a", "temperature": {number}}}'
    response = httpx.post(f"{server.url}{TEXT}", content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    error_of(response)


def test_unknown_fields_are_ignored(server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 1, "nonesuch": {"deep": [1]}, "metadata": {"a": "b"}, "store": False}
    assert server.post(TEXT, body).status_code == 200


def test_a_template_that_refuses(server: Running) -> None:
    """The fault of the messages, not of the server."""
    response = server.post(CHAT, {"messages": [{"role": "tool", "content": "4"}]})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "messages"
    assert "no tools here" in error["message"]


def test_prompts_that_are_too_long(server: Running) -> None:
    """At the limit exactly; and far above it, where nothing is tokenized."""
    assert server.post(TEXT, {"prompt": "a" * 191, "max_tokens": 5}).json()["usage"]["completion_tokens"] == 1
    for text in ("a" * 192, "a" * 100_000):
        for path, body, param in (
            (TEXT, {"prompt": text}, "prompt"),
            (CHAT, {"messages": [{"role": "user", "content": text}]}, "messages"),
        ):
            response = server.post(path, body)
            assert response.status_code == 400
            error = error_of(response)
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert "192 tokens" in error["message"]


def test_404_405_and_parameters_of_the_url(server: Running) -> None:
    for response, status in (
        (server.get("/v1/nonesuch"), 404),
        (server.get("/static/nonesuch.js"), 404),
        (server.get("/static/../app.py"), 404),
        (server.get(TEXT), 405),
        (server.get("/graphs/steps?after=x"), 400),
        (server.get("/graphs/steps?after=-1"), 400),
        (server.post(TEXT, {"prompt": "a", "model": "gpt-4"}), 404),
    ):
        assert response.status_code == status
        error_of(response)


def test_415(server: Running) -> None:
    """Text that another site's page may post without asking, and forms."""
    raw = json.dumps({"prompt": "a"})
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = httpx.post(f"{server.url}{TEXT}", content=raw, headers={"Content-Type": kind})
        assert response.status_code == 415
        error_of(response)
    kinds = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert httpx.post(f"{server.url}{TEXT}", content=raw, headers=kinds).status_code == 200


def test_413_declared_or_found_out(model: TinyModel) -> None:
    body = json.dumps({"prompt": "a", "filler": "x" * 3000}).encode()

    def pieces() -> Any:
        yield from (body[start : start + 500] for start in range(0, len(body), 500))

    kind = {"Content-Type": "application/json"}
    with running(lambda: open_llm(model), max_body_bytes=2000) as server:
        for content in (body, pieces()):
            response = httpx.post(f"{server.url}{TEXT}", content=content, headers=kind)
            assert response.status_code == 413
            assert "2000 bytes" in error_of(response)["message"]
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_422_for_what_the_pool_cannot_hold(model: TinyModel) -> None:
    """4 blocks of 16 hold 64 tokens. Without a limit of its own an answer ends there."""
    with running(lambda: open_llm(model, num_gpu_blocks_override=5)) as server:
        response = server.post(TEXT, {"prompt": "a" * 40, "max_tokens": 40})
        assert response.status_code == 422
        assert "KV blocks" in error_of(response)["message"]
        answer = server.post(CHAT, {"messages": USER, "ignore_eos": True}).json()
        assert answer["usage"]["total_tokens"] == 65


@pytest.mark.parametrize("method", ["get", "post"])
def test_401(model: TinyModel, method: str) -> None:
    secret = "sésame"
    with running(lambda: open_llm(model), api_keys=["other", secret]) as server:

        def status(path: str, headers: dict[str, str] | dict[str, bytes] | None = None) -> int:
            json_body = {"json": {"prompt": "a", "max_tokens": 1}} if method == "post" else {}
            return httpx.request(method, f"{server.url}{path}", headers=headers, **json_body).status_code  # type: ignore[arg-type]

        path = TEXT if method == "post" else "/v1/models"
        assert status(path) == 401
        assert status(path, {"Authorization": "Bearer"}) == 401
        assert status(path, {"Authorization": "Bearer othe"}) == 401
        assert status(path, {"Authorization": "Bearer other2"}) == 401
        assert status(path, {"Authorization": "Basic other"}) == 401
        assert status(path, {"Authorization": "Bearer other"}) == 200
        assert status(path, {"Authorization": f"bearer {secret}".encode()}) == 200
        if method == "get":
            assert [status(name) for name in ("/graphs/state", "/graphs/requests", "/v1/models/tiny")] == [401] * 3
            assert [status(name) for name in ("/health", "/version", "/metrics", "/docs")] == [200] * 4
            with pytest.raises(openai.AuthenticationError) as caught:
                server.client(api_key="wrong").models.list()
            assert caught.value.code == "invalid_api_key"
            assert server.client(api_key="other").models.list().data


def test_429_when_the_queue_is_full(model: TinyModel) -> None:
    """One row and two that may wait: of the fourth on, each is told to come back; those accepted are all answered."""
    with running(lambda: open_llm(model, max_num_seqs=1), max_queue=2) as server:
        body = {"prompt": "abc", "max_tokens": 150, "ignore_eos": True}
        statuses: list[int] = []
        slow = contextlib.ExitStack()
        slow.enter_context(server.slow_steps(0.2))  # all three are open until the others have been refused
        threads = [
            threading.Thread(target=lambda: statuses.append(server.post(TEXT, body).status_code)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        while server.engine.num_open < 3:
            time.sleep(0.005)
        response = server.post(TEXT, body)
        assert response.status_code == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert error_of(response)["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            server.client().completions.create(model="tiny", prompt="a")
        # more answers than there ever is room for: coming back would not help
        never = server.post(TEXT, body | {"n": 4})
        assert never.status_code == 400
        assert error_of(never)["param"] == "n"
        slow.close()
        for thread in threads:
            thread.join()
        assert statuses == [200, 200, 200]
        assert server.post(TEXT, body | {"max_tokens": 1}).status_code == 200
        assert 'requests_refused_total{model_name="tiny"} 2.0' in server.get("/metrics").text


def test_503_while_starting_and_while_draining(model: TinyModel) -> None:
    go_on = threading.Event()

    def slow_start() -> LLM:
        go_on.wait(LONGEST_S)
        return open_llm(model)

    paths = ["/v1/models", "/graphs/state", "/graphs/steps"]
    with running(slow_start, wait=False) as server:

        def all_refuse() -> None:
            responses = [server.post(TEXT, {"prompt": "a"}), server.post(CHAT, {"messages": USER})]
            for response in responses:
                assert response.status_code == 503
                assert int(response.headers["Retry-After"]) >= 1
                assert error_of(response)["code"] == "unavailable"

        all_refuse()
        assert [server.get(path).status_code for path in paths] == [503] * 3
        health = server.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "starting"})
        assert [server.get(path).status_code for path in ("/version", "/metrics")] == [200, 200]
        go_on.set()
        server.on_loop(server.engine.ready)
        assert server.get("/health").json() == {"status": "ok"}
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}).status_code == 200
        server.loop.call_soon_threadsafe(server.engine.begin_drain)
        while server.engine.state is not EngineState.DRAINING:
            time.sleep(0.005)
        all_refuse()
        assert server.get("/health").json() == {"status": "draining"}
        assert server.get("/graphs/state").status_code == 200


def test_a_model_without_a_tokenizer(tiny_model: TinyFactory) -> None:
    """Token ids are served; what needs text says so."""
    plain = tiny_model("Llama")
    with running(lambda: open_llm(plain)) as server:
        answer = server.post(TEXT, {"prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 1}).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["text"] == ""
        assert answer["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
        for path, body in (
            (TEXT, {"prompt": "text"}),
            (TEXT, {"prompt": [5], "stop": "x"}),
            (TEXT, {"prompt": [5], "echo": True}),
            (CHAT, {"messages": USER}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [5]}),
        ):
            response = server.post(path, body)
            assert response.status_code == 400, body
            error_of(response)


def test_every_sampling_field_is_looked_at() -> None:
    """A parameter that the engine has and requests may set is not forgotten in the schema, nor refused there."""
    left_out = {"prompt_logprobs", "detokenize", "structured_outputs"}
    from dataclasses import fields

    from ostinato import SamplingParams

    assert _SAME_NAME | _OTHERWISE | left_out == {field.name for field in fields(SamplingParams)}
    for schema in (ChatRequest, CompletionRequest):
        assert not set(schema.refused) & set(schema.model_fields)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_the_engine_gives_up(server: Running, stream: bool) -> None:
    """Its client is told, its other answers end with it, and the next request is served."""

    def give_up(llm: LLM) -> None:
        original = llm.engine.scheduler.update

        def update(plan: Any, result: Any) -> Any:
            events = original(plan, result)
            if events:
                first = events[0]
                llm.engine.scheduler.fail(first.request.request_id, "made up")
                events[0] = first._replace(finished=True)
                llm.engine.scheduler.update = original  # type: ignore[method-assign]
            return events

        llm.engine.scheduler.update = update  # type: ignore[method-assign]

    server.wait_idle()
    server.between_steps(give_up)
    body = {"prompt": "a", "max_tokens": 150, "ignore_eos": True, "n": 3, "stream": stream}
    response = server.post(TEXT, body)
    if stream:
        *_, told, done = [line for line in response.text.splitlines() if line]
        assert done == "data: [DONE]"
        error = json.loads(told.removeprefix("data: "))["error"]
    else:
        assert response.status_code == 500
        error = error_of(response)
    assert error["message"] == "this answer could not be completed: made up"
    server.wait_idle()
    assert server.post(TEXT, {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_long_prompt_does_not_hold_up_the_loop(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are answered while it is tokenized, and it is still served."""
    with running(lambda: open_llm(model, max_model_len=512)) as server:
        tokenizer = server.engine.info.tokenizer
        assert tokenizer is not None
        encode = tokenizer.encode
        begun, go_on = threading.Event(), threading.Event()

        def slow(text: str, add_special_tokens: bool = True) -> list[int]:
            begun.set()
            assert go_on.wait(LONGEST_S)
            return encode(text[:300], add_special_tokens)

        monkeypatch.setattr(tokenizer, "encode", slow)
        monkeypatch.setattr(tokenizer, "max_token_chars", 100)
        statuses: list[int] = []
        long = [
            (TEXT, {"prompt": "a" * 5000, "max_tokens": 1}),
            (CHAT, {"messages": [{"role": "user", "content": "a" * 5000}], "max_tokens": 1}),
        ]
        for path, body in long:
            begun.clear()
            go_on.clear()
            thread = threading.Thread(
                target=lambda path=path, body=body: statuses.append(server.post(path, body).status_code)
            )
            thread.start()
            assert begun.wait(LONGEST_S)
            assert server.get("/health").status_code == 200
            assert server.post(TEXT, {"prompt": [1, 2], "max_tokens": 3}).status_code == 200
            assert not statuses
            go_on.set()
            thread.join()
            assert statuses == [200]
            statuses.clear()
