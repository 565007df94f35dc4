"""Ladders from files of steps. What a server says is in tests/server/test_tune.py."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ostinato.cli.main import main
from ostinato.cli.traffic import read_traffic
from ostinato.graphs.buckets import mixed_ladder, uniform_ladder
from ostinato.graphs.dispatch import LiveCount

LINES = """kind,size,steps
uniform,7,1000   # most of the time
9
33,500

mixed,300,20
mixed,1100
"""
METRICS = """# HELP ostinato:step_live_sizes_total Steps by live size.
# TYPE ostinato:step_live_sizes_total counter
ostinato:step_live_sizes_total{model_name="a \\"b\\"",query_len="1",size="7"} 1000.0
ostinato:step_live_sizes_total{model_name="a \\"b\\"",query_len="-",size="300"} 2e+01
ostinato:graph_config_info{cudagraph_mode="FULL_AND_PIECEWISE",max_num_batched_tokens="512",max_num_seqs="32"} 1.0
ostinato:graph_recordings{model_name="m"} 4.0
ostinato:graph_recording_bytes{model_name="m"} 4e+06
"""


def tune(folder: Path, text: str, *words: str) -> dict[str, Any]:
    source, found = folder / "steps", folder / "found.json"
    source.write_text(text)
    assert main(["tune", str(source), *words, "--json", str(found)]) == 0
    facts: dict[str, Any] = json.loads(found.read_text())
    return facts


def test_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = tune(tmp_path, LINES)
    uniform, mixed = facts["ladders"]["uniform"], facts["ladders"]["mixed"]
    assert (uniform["steps"], uniform["live"]) == (1501, 7 * 1000 + 9 + 33 * 500)
    assert (mixed["steps"], mixed["live"]) == (21, 300 * 20 + 1120)  # large sizes are rounded up
    assert uniform["default"]["sizes"] == list(uniform_ladder(256))
    assert uniform["default"]["computed"] == 8 * 1000 + 16 + 40 * 500
    assert mixed["default"]["sizes"] == list(mixed_ladder(2048))
    assert {7, 9, 33, 256} <= set(uniform["tuned"]["sizes"])
    assert (uniform["tuned"]["padding"], mixed["tuned"]["padding"]) == (0, 0)
    assert uniform["tuned"]["eager_steps"] == mixed["tuned"]["eager_steps"] == 0
    # any batch that has not come is served too
    for kind in (uniform, mixed):
        sizes = [0, *kind["tuned"]["sizes"]]
        assert all(above <= 2 * (below + 1) for below, above in pairwise(sizes))
    out = capsys.readouterr().out
    assert "padding: 4,619 with the default ladders, 0 with these (100.0% less)" in out
    # what is printed is what the engine takes
    assert f"cudagraph_capture_sizes={json.dumps(facts['options']['cudagraph_capture_sizes'])}" in out
    option = next(line for line in out.splitlines() if line.startswith("--cudagraph-capture-sizes"))
    listed = ["/".join(",".join(map(str, kind["tuned"]["sizes"])) for kind in (uniform, mixed))]
    assert option.split()[1:] == listed


def test_the_printed_option_is_accepted(
    tmp_path: Path, model: str, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    tune(tmp_path, "3,50\n4,2\nmixed,20,5\n", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--seen-only")
    option = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("--cudagraph"))
    assert main(["plan", model, *small, *option.split(), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["uniform_sizes"], facts["mixed_sizes"]) == ([3, 4], [20, 32])


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["--max-sizes", "6"], {"uniform": [7, 9, 33, 256], "mixed": [300, 2048]}),
        (["--max-sizes", "5"], {"uniform": [9, 33, 256], "mixed": [300, 2048]}),
        (["--max-bytes", "16MB", "--graph-bytes", "3MB"], {"uniform": [9, 33, 256], "mixed": [300, 2048]}),
        (["--cudagraph-mode", "FULL_DECODE_ONLY", "--max-num-seqs", "33"], {"uniform": [7, 9, 33]}),
        (["--cudagraph-mode", "PIECEWISE"], {"mixed": [7, 9, 33, 300, 1120, 2048]}),
        (["--max-num-batched-tokens", "1100"], {"uniform": [7, 9, 33, 256], "mixed": [300, 1100]}),
    ],
)
def test_budgets_modes_and_limits(tmp_path: Path, words: list[str], sizes: dict[str, list[int]]) -> None:
    found = tune(tmp_path, LINES, "--seen-only", *words)
    assert found["options"] == {"cudagraph_capture_sizes": sizes}


def test_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = tune(tmp_path, METRICS, "--seen-only")
    assert (facts["max_num_seqs"], facts["max_num_batched_tokens"]) == (32, 512)
    assert facts["options"]["cudagraph_capture_sizes"] == {"uniform": [7, 32], "mixed": [300, 512]}
    assert "up to 32 requests and 512 tokens a step" in " ".join(capsys.readouterr().out.split())
    # a million bytes each, on the average
    facts = tune(tmp_path, METRICS, "--seen-only", "--max-bytes", "3500000")
    assert facts["options"]["cudagraph_capture_sizes"] == {"uniform": [7, 32], "mixed": [512]}
    # a limit that is typed counts, as does a mode
    facts = tune(tmp_path, METRICS, "--seen-only", "--max-num-seqs", "64", "--cudagraph-mode", "FULL_DECODE_ONLY")
    assert facts["options"]["cudagraph_capture_sizes"] == {"uniform": [7, 64]}


def test_a_server_without_graphs_shows_what_they_would_do(tmp_path: Path) -> None:
    facts = tune(tmp_path, METRICS.replace("FULL_AND_PIECEWISE", "NONE"), "--seen-only")
    assert facts["cudagraph_mode"] == "FULL_AND_PIECEWISE"
    assert set(facts["ladders"]) == {"uniform", "mixed"}


def test_a_kind_that_never_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = tune(tmp_path, "7\n7\n")
    assert facts["ladders"]["mixed"]["tuned"]["sizes"] == list(mixed_ladder(2048))
    assert "no mixed batch was counted: its default ladder stays" in capsys.readouterr().out


def test_a_step_log(tmp_path: Path) -> None:
    steps = [{"id": 1, "rows": 2, "tokens": 30}, {"id": 2, "rows": 7, "tokens": 7}]
    for text in (json.dumps({"last": 2, "steps": steps}), json.dumps(steps)):
        source = tmp_path / "log.json"
        source.write_text(text)
        assert read_traffic(str(source)).counts == [LiveCount(None, 30, 1), LiveCount(1, 7, 1)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no steps"),
        ("size,steps\n", "holds no steps"),
        ("7\nseven\n", "line 2: 'seven' is not a batch: write a size"),
        ("7,1.5\n", "line 1: '7,1.5' is not a batch"),
        ("7,1,2\n", "line 1"),
        ("7\n0\n", "line 2: '0'"),
        ("7\nmixed\n", "line 2: 'mixed'"),
        ("7,0\n", "holds no steps"),
        ("300\n", "steps of 300 were counted, above max_num_seqs=256: say --max-num-seqs as served"),
        ("mixed,3000\n", "above max_num_batched_tokens=2048: say --max-num-batched-tokens"),
        ("{", "is not JSON"),
        ('{"steps": [{"rows": 1}]}', "no list of steps, each with rows and tokens"),
        ('{"steps": 3}', "no list of steps"),
        ("[]", "holds no steps"),
        ('[{"rows": 0, "tokens": 0}]', "size 0 or below"),
        ("# HELP vllm:prompt_tokens_total x\n", "has no ostinato:step_live_sizes_total"),
        (METRICS.replace("1000.0", "many"), "line 3: not a metric of Ostinato"),
        (METRICS.replace('size="7"', 'size="x"'), "line 3: not a metric of Ostinato"),
        (METRICS.replace("1000.0", "0").replace("2e+01", "0"), "has run no step that a ladder could serve"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str) -> None:
    source = tmp_path / "steps"
    source.write_text(text)
    assert main(["tune", str(source)]) == 2
    assert says in capsys.readouterr().err


def test_other_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "steps"
    source.write_text(LINES)
    assert main(["tune", str(source), "--max-bytes", "1GiB"]) == 2
    assert "--max-bytes needs to know what a recording holds" in capsys.readouterr().err
    assert main(["tune", str(source), "--max-sizes", "1"]) == 2
    assert "a budget of 1 sizes does not hold the largest size of each ladder" in capsys.readouterr().err
    assert main(["tune", str(source), "--json", str(tmp_path / "no" / "such.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    source.write_bytes(b"\xff\xfe\x00")
    assert main(["tune", str(source)]) == 2
    assert "is not text" in capsys.readouterr().err
