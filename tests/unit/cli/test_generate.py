"""`generate` on random weights, token ids in and out."""

from __future__ import annotations

import io
import json

import pytest

from ostinato import LLM, SamplingParams
from ostinato.cli.main import main

PROMPTS = ([1, 2, 3], [5] * 7, [90, 4])


def ids_of(prompts: tuple[list[int], ...]) -> list[str]:
    return [word for prompt in prompts for word in ("--prompt-ids", ",".join(map(str, prompt)))]


def test_json_equals_the_python_api(model: str, small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", model, *small, *ids_of(PROMPTS), "--temperature", "0", "--max-tokens", "6", "--json"]
    assert main([*words, "--logprobs", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt_token_ids"] for row in rows] == list(PROMPTS)
    with LLM(
        model, load_format="dummy", device="cpu", max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64
    ) as llm:
        outputs = llm.generate(list(PROMPTS), SamplingParams(temperature=0.0, max_tokens=6))
    assert [row["outputs"][0]["token_ids"] for row in rows] == [output.outputs[0].token_ids for output in outputs]
    assert all(len(row["outputs"][0]["logprobs"]) == 6 for row in rows)


def test_text_stands_alone_or_gets_labels(model: str, small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", model, *small, "--enforce-eager", "--max-tokens", "3", "--ignore-eos", "--seed", "4"]
    assert main([*words, "--prompt-ids", "1,2,3"]) == 0
    alone = capsys.readouterr().out
    assert len(alone.split()) == 3
    assert main([*words, "--prompt-ids", "1,2,3", "--n", "2", "--stats"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "[request-0.0, length]"
    assert lines[1] == alone.strip()
    assert lines[2] == "[request-0.1, length]"
    assert "graphs are off" in captured.err


def test_check_mode_is_reported(model: str, small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", model, *small, *ids_of(PROMPTS), "--max-tokens", "4", "--check", "2", "--stats"]
    assert main(words) == 0
    assert "equal an eager run bit for bit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stdin", "words", "message"),
    [
        ("", [], "no prompt: give one as an argument"),
        ("hello\n", [], "has no tokenizer"),
        ("", ["--prompt-ids", "1,200"], "200 is not in the vocabulary"),
        ("", ["--chat", "hello"], "chat needs a tokenizer"),
        ("", ["--prompt-ids", ",".join(["1"] * 64)], "64"),
        ("", ["--prompt-ids", "1", "--max-model-len", "999"], "above the model's 256 positions"),
    ],
)
def test_errors(
    model: str,
    small: list[str],
    stdin: str,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    assert main(["generate", model, *small, "--enforce-eager", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("ostinato: error: ") == 1
