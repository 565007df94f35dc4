"""Requests made up from the API's own description, right and wrong: no 5xx, no hang, only documented answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode, checks

from ..e2e.models import build_tiny
from .conftest import TEMPLATE, open_llm
from .running import LONGEST_S, Running, running

schemathesis.checks.load_all_checks()

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
OPERATIONS = {
    "POST /v1/chat/completions": 30,
    "POST /v1/completions": 50,
    "POST /tokenize": 25,
    "POST /detokenize": 25,
    "GET /v1/models": 2,
    "GET /v1/models/{model}": 10,
    "GET /health": 2,
    "GET /version": 2,
    "GET /metrics": 2,
    "GET /graphs/state": 2,
    "GET /graphs/steps": 10,
    "GET /graphs/pool": 2,
    "GET /graphs/requests": 2,
}
"""How many examples of each."""

CAN_BE_WRONG = [name for name in OPERATIONS if name.startswith("POST") or name == "GET /graphs/steps"]
"""The others take nothing, or any text at all."""


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of its own: it must still be whole when all is over. Its model can write every text, as structures may
    ask for any."""
    folder = tmp_path_factory.mktemp("fuzzed")
    model = build_tiny(folder, "Llama", vocab_size=257, tokenizer=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with running(lambda: open_llm(model, max_model_len=48), tool_call_parser="hermes") as server:
        num_tasks = server.num_tasks()
        yield server
        server.assert_nothing_leaked(num_tasks + 8)
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def simpler(body: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """What must be there and a few fields more. With all fields at once one is nearly always out of the model's range,
    and nothing would ever run."""
    optional = sorted(set(body) - {"messages", "prompt", "tokens", "model"})
    kept = data.draw(st.sets(st.sampled_from(optional), max_size=4)) if optional else set()
    found = {name: value for name, value in body.items() if name in kept or name in ("messages", "prompt", "tokens")}
    for message in found.get("messages") or ():
        if not isinstance(message.get("content"), str):
            message["content"] = "hi"
    return found


@pytest.mark.parametrize(
    ("mode", "name"),
    [(GenerationMode.POSITIVE, name) for name in OPERATIONS]
    + [(GenerationMode.NEGATIVE, name) for name in CAN_BE_WRONG],
)
def test_made_up_requests(fuzzed: Running, mode: GenerationMode, name: str) -> None:
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    method, path = name.split()
    operation = schema[path][method]
    statuses: set[int] = set()

    @hypothesis.settings(
        max_examples=OPERATIONS[name],
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def fuzz(case: schemathesis.Case, data: st.DataObject) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = simpler(case.body, data)
        response = case.call(timeout=LONGEST_S)  # the longest answers of this model take less than a second alone
        case.validate_response(response, checks=CHECKS)
        statuses.add(response.status_code)

    fuzz()
    assert statuses, "no example was sent"
    if mode is GenerationMode.POSITIVE:
        assert 200 in statuses or name == "GET /v1/models/{model}", statuses


def test_every_operation_is_made_up(fuzzed: Running) -> None:
    described = {
        f"{method.upper()} {path}"
        for path, methods in fuzzed.get("/openapi.json").json()["paths"].items()
        for method in methods
    }
    assert described == set(OPERATIONS)
