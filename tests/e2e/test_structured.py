"""Outputs with a structure: the tokens that may follow are data of the step, in every mode and with steps in flight."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from ostinato import LLM, ConfigError, SamplingParams, StructuredOutputsParams

from .conftest import TinyFactory
from .driving import MODES
from .models import TinyModel
from .test_sampling import open_llm

pytest.importorskip("llguidance", reason="llguidance is not installed")

V = 256
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
COMPACT = {**SCHEMA, "x-guidance": {"whitespace_pattern": ""}}
CHOICES = ("yes", "no", "maybe so")


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Llama", vocab_size=V, tokenizer=True)


@pytest.fixture(scope="module")
def llm(model: TinyModel) -> Iterator[LLM]:
    with open_llm(model, max_in_flight=2) as opened:
        yield opened


def params(seed: int = 0, temperature: float = 1.0, max_tokens: int = 80, **structure: object) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens,
        structured_outputs=StructuredOutputsParams(**structure),  # type: ignore[arg-type]
    )  # fmt: skip


def texts(llm: LLM, all_params: list[SamplingParams]) -> list[str]:
    outputs = llm.generate(["Say it: "] * len(all_params), all_params)
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_structures_beside_free_rows_in_every_mode(model: TinyModel, mode: str, max_in_flight: int) -> None:
    """A random model says what it is told to; rows without a structure say what they do alone."""
    free = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    structured = [
        params(1, json=SCHEMA), params(2, regex="[ab]{3}[0-9]+x"), params(3, choice=CHOICES),
        params(4, temperature=0.0, json=json.dumps(COMPACT)), params(5, grammar='start: "a" ("b" | "c"){2} "d"'),
    ]  # fmt: skip
    with open_llm(model, mode, max_in_flight=max_in_flight) as llm:
        alone = llm.generate(["Say it: "], free)[0].outputs[0].token_ids
        outputs = llm.generate(["Say it: "] * 6, [*structured, free])
        assert llm.stats().free_blocks == llm.stats().num_blocks - 1
    answers = [output.outputs[0] for output in outputs]
    assert answers[5].token_ids == alone
    assert [answer.finish_reason for answer in answers[:5]] == ["stop"] * 5
    for answer in (answers[0], answers[3]):
        said = json.loads(answer.text)
        assert set(said) == {"name", "age"} and len(said["name"]) <= 5 and 0 <= said["age"] <= 99
    assert re.fullmatch("[ab]{3}[0-9]+x", answers[1].text)
    assert answers[2].text in CHOICES
    assert re.fullmatch("a[bc]{2}d", answers[4].text)


def test_the_same_seed_gives_the_same_in_any_company(llm: LLM) -> None:
    together = texts(llm, [params(seed, choice=CHOICES) for seed in range(12)])
    assert together == [texts(llm, [params(seed, choice=CHOICES)])[0] for seed in range(12)]
    assert len(set(together)) > 1, "the seeds do not matter"


def test_a_row_that_had_a_structure_is_free_again(llm: LLM) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    before = llm.generate(["Say it: "], free)[0].outputs[0].token_ids
    texts(llm, [params(seed, choice=["no"]) for seed in range(6)])  # all of its rows
    assert llm.generate(["Say it: "], free)[0].outputs[0].token_ids == before
    assert texts(llm, [params(7, choice=["yes"])]) == ["yes"]


def test_any_object(llm: LLM) -> None:
    """Greedy, so that it may run into max_tokens; what there is begins an object."""
    output = llm.generate(["Say it: "], params(temperature=0.0, max_tokens=12, json_object=True))[0].outputs[0]
    assert output.text.lstrip().startswith("{")


def test_the_structure_ends_the_output_even_without_eos(llm: LLM) -> None:
    given = SamplingParams(
        temperature=1.0, seed=3, max_tokens=50, ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="ab?")
    )
    output = llm.generate(["Say it: "], given)[0].outputs[0]
    assert output.finish_reason == "stop" and output.text in ("a", "ab")


def test_preempted_and_resumed(model: TinyModel) -> None:
    """A pool that holds few of them: each goes on where it was."""
    asked = [params(seed, regex="(abc){20}") for seed in range(6)]
    with open_llm(model, num_gpu_blocks_override=14, max_in_flight=2) as llm:
        assert texts(llm, asked) == ["abc" * 20] * 6
        assert llm.stats().preemptions > 0
        llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("structure", "says"),
    [
        ({"json": "{not json"}, "structured_outputs cannot be compiled"),
        ({"json": {"type": "nonsense"}}, "structured_outputs cannot be compiled"),
        ({"regex": "("}, "structured_outputs cannot be compiled"),
        ({"grammar": "start: missing"}, "structured_outputs cannot be compiled"),
    ],
)
def test_malformed_structures_are_refused(llm: LLM, structure: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        llm.generate(["Say it: "], params(**structure))
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("structure", [{}, {"regex": "a", "choice": ["b"]}, {"json_object": False}, {"choice": []}])
def test_one_structure_exactly(structure: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="StructuredOutputsParams"):
        StructuredOutputsParams(**structure)  # type: ignore[arg-type]


def test_what_does_not_go_with_a_structure() -> None:
    with pytest.raises(ConfigError, match="min_tokens=3: with structured_outputs"):
        SamplingParams(min_tokens=3, structured_outputs=StructuredOutputsParams(regex="a"))


def test_a_model_without_a_tokenizer(tiny_model: TinyFactory) -> None:
    with open_llm(tiny_model("Llama", vocab_size=V)) as llm, pytest.raises(ConfigError, match="need a tokenizer"):
        llm.generate([[1, 2, 3]], params(regex="a"))


def test_a_token_outside_the_structure_fails_its_request_alone(llm: LLM) -> None:
    """As if a mask had not reached the device."""

    class Stubborn:
        def mask(self) -> bytes:
            return b"\xff" * (V // 8)

        def accept(self, token_id: int) -> bool:
            from ostinato import OstinatoError

            raise OstinatoError(f"token {token_id} is not allowed")

    engine = llm.engine
    bad = engine.add_request("bad", [5, 6], SamplingParams(max_tokens=5), grammar=Stubborn())
    good = engine.add_request("good", [5, 6], SamplingParams(max_tokens=5, ignore_eos=True))
    deltas = []
    while engine.has_unfinished:
        deltas += engine.step()
    assert bad.request.finish_reason == "error" and "not allowed" in str(bad.request.stop_reason)
    assert good.request.finish_reason == "length" and len(good.request.output_token_ids) == 5
    assert [delta.finish_reason for delta in deltas if delta.request_id == "bad"] == ["error"]
    engine.scheduler.check_integrity()


def test_a_vocabulary_that_the_library_refuses(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a release that is too old does: this request is told, and others go on."""
    import llguidance

    def refuse(*args: object, **options: object) -> None:
        raise TypeError("argument 'eos_token': 'list' object cannot be interpreted as an integer")

    monkeypatch.setattr(llguidance, "LLTokenizer", refuse)
    with open_llm(model) as llm:
        with pytest.raises(ConfigError, match=r"1\.7 or later is needed.*eos_token"):
            llm.generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(choice=["b"])))
        assert len(llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3
