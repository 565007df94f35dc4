"""Answers with a structure, through the real client."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pydantic
import pytest

from ostinato.sampling.grammar import MAX_CHARS

from .running import Running

pytest.importorskip("llguidance", reason="llguidance is not installed")

USER: Any = [{"role": "user", "content": "Name a river."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5, "pattern": "^[a-z]*$"}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},
}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "river", "schema": schema, "strict": True}}


def check(text: str | None) -> None:
    said = json.loads(text or "")
    assert list(said) == ["name", "age"]
    assert re.fullmatch("[a-z]{0,5}", said["name"])
    assert said["age"] in (1, 22, 333)


def chat(server: Running, **options: Any) -> Any:
    given = {"model": "tiny", "messages": USER, "max_tokens": 100, "temperature": 1.0, "seed": 5} | options
    return server.client().chat.completions.create(**given)


@pytest.mark.usefixtures("no_leaks")
def test_a_json_schema_for_each_of_several_answers(server: Running) -> None:
    answer = chat(server, n=3, response_format=json_schema(SCHEMA))
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    for choice in answer.choices:
        check(choice.message.content)
    assert len({choice.message.content for choice in answer.choices}) > 1, "answers share their place in the grammar"


def test_a_stream_says_the_same(server: Running) -> None:
    whole = chat(server, response_format=json_schema(SCHEMA)).choices[0].message.content
    chunks = list(chat(server, response_format=json_schema(SCHEMA), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_parse_with_a_pydantic_model(server: Running) -> None:
    class Point(pydantic.BaseModel):
        x: int = pydantic.Field(ge=0, le=9)
        up: bool

    answer = server.client().chat.completions.parse(
        model="tiny", messages=USER, max_tokens=150, seed=1, response_format=Point
    )
    point = answer.choices[0].message.parsed
    assert isinstance(point, Point)
    assert 0 <= point.x <= 9


def test_any_object(server: Running) -> None:
    """A random model does not come to an end by itself; what there is begins an object."""
    answer = chat(server, response_format={"type": "json_object"}, max_tokens=8)
    assert (answer.choices[0].message.content or "").lstrip().startswith("{")


TAG = json.dumps({"structures": [{"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}], "triggers": ["<"]})


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}x"}}, "[ab]{3}x"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "a" ("b" | "c"){2}'}}, "a[bc]{2}"),
        ({"structured_outputs": {"json": {"enum": [12, 34]}}}, "12|34"),
        ({"structured_outputs": {"json": '{"enum": ["s"]}'}}, '"s"'),
        ({"guided_json": {"enum": [7]}}, "7"),
        ({"guided_regex": "q+w"}, "q+w"),
        ({"guided_choice": ["one"]}, "one"),
        ({"guided_grammar": 'start: "g"'}, "g"),
    ],
)
def test_other_spellings_on_both_paths(server: Running, options: dict[str, Any], pattern: str) -> None:
    said = chat(server, extra_body=options).choices[0].message.content
    assert re.fullmatch(pattern, said), said
    answer = server.client().completions.create(
        model="tiny", prompt=["a", "b"], n=2, max_tokens=100, extra_body=options
    )
    assert len(answer.choices) == 4
    for choice in answer.choices:
        assert re.fullmatch(pattern, choice.text), choice.text
        assert choice.finish_reason == "stop"


def test_structural_tags(server: Running) -> None:
    """The model is made to write the trigger; what comes after is forced."""
    bias = {str(ord("<")): 100}
    options = {"structured_outputs": {"structural_tag": TAG}}
    said = chat(server, extra_body=options, logit_bias=bias, max_tokens=60).choices[0].message.content
    assert re.search(r"<n>-?\d+", said), said
    assert not re.search("<n[^>]", said), said


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": json_schema({"type": "nonsense"})}, "response_format.json_schema.schema"),
        ({"response_format": json_schema({"$ref": "#/$defs/x"})}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": "{not json"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": "["}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": "a" * (MAX_CHARS + 1)}}, "structured_outputs.regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_400_names_the_field(server: Running, path: str, options: dict[str, Any], param: str) -> None:
    ask = {"messages": USER} if path.startswith("chat") else {"prompt": "a"}
    response = server.post(f"/v1/{path}", ask | {"max_tokens": 5} | options)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_a_chain_of_rules_does_not_end_the_process(server: Running) -> None:
    """The library goes down it by recursion: on the stack of an ordinary thread this is a segmentation fault."""
    chain = "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(8000)) + 'a8000: "z"'
    assert len(chain) < MAX_CHARS
    response = server.post("/v1/completions", {"prompt": "a", "structured_outputs": {"grammar": chain}})
    assert response.status_code in (200, 400), response.text
    assert server.get("/health").status_code == 200


def test_leaving_in_the_middle(server: Running) -> None:
    server.wait_idle()
    stream = chat(server, stream=True, max_tokens=150, n=2, extra_body={"structured_outputs": {"regex": "(ab)+"}})
    with stream:
        for _ in zip(range(4), stream, strict=False):
            pass
    server.assert_nothing_leaked(server.num_tasks())
    check(chat(server, response_format=json_schema(SCHEMA)).choices[0].message.content)


def test_grammars_that_are_being_compiled_count_as_open(server: Running) -> None:
    """Otherwise clients could make the server compile without a limit."""
    engine = server.engine

    async def full() -> None:
        engine._num_compiling += 10_000
        try:
            engine.check_room()
        finally:
            engine._num_compiling -= 10_000

    with pytest.raises(Exception, match="try again later"):
        server.on_loop(full)


def test_the_client_raises_the_field(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(server, response_format=json_schema({"type": "nonsense"}))
    assert caught.value.param == "response_format.json_schema.schema"
    assert "response_format.json_schema.schema cannot be compiled" in str(caught.value)


def test_null_asks_for_nothing(server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 1, "response_format": None, "structured_outputs": None, "guided_json": None}
    response: httpx.Response = server.post("/v1/completions", body)
    assert response.status_code == 200
