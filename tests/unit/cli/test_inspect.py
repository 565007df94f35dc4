"""What `inspect` tells of a recording."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM
from ostinato.cli.dot import to_dot
from ostinato.cli.main import main
from ostinato.cli.recording_lines import Line, layers_of, recording_lines, totals
from ostinato.graphs.dispatch import BatchKey
from ostinato.graphs.mode import RuntimeMode
from ostinato.graphs.nodes import GraphNode


def inspect(tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "nodes.json"
    assert main(["inspect", *words, "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_whole_step(model: str, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = inspect(tmp_path, model, *small)
    assert (facts["key"], facts["mode"], facts["backend"]) == ("decode:1", "FULL", "tape")
    nodes = facts["nodes"]
    assert len(nodes) == facts["num_nodes"]
    names = [node["name"].removeprefix("ostinato.") for node in nodes]
    assert (names[0], names[1], names[-1]) == ("prepare", "embed", "advance")
    assert [node["index"] for node in nodes] == list(range(len(nodes)))
    assert all(before < node["index"] for node in nodes for before in node["depends_on"])
    attention = [node for node in nodes if node["name"] == "ostinato.decode_attention"]
    assert [node["layer"] for node in attention] == [0, 1, 2]
    assert [node["layer"] for node in nodes[:3]] == [None, None, 0]
    assert nodes[-1]["layer"] is None
    out = capsys.readouterr().out
    assert "ostinato.decode_attention" in out
    assert "float32[1,48]" in out
    assert f"decode:1, FULL on tape: graphs 1, nodes {len(nodes)}," in out


def test_cuts_stand_in_their_places(model: str, small: list[str], tmp_path: Path) -> None:
    nodes = inspect(tmp_path, model, *small, "--key", "mixed:8")["nodes"]
    eager = [node for node in nodes if node["kind"] == "eager"]
    assert [node["name"] for node in eager] == ["attention", "attention", "attention", "head"]
    assert [node["segment"] for node in eager] == [1, 3, 5, 7]
    assert [node["layer"] for node in eager] == [0, 1, 2, None]
    assert all(node["depends_on"] for node in nodes[1:] if node["kind"] == "eager")
    third = inspect(tmp_path, model, *small, "--key", "mixed:8", "--segment", "2")["nodes"]
    assert third == [node for node in nodes if node["segment"] == 2]


def test_another_cut_leaves_attention_in_the_graphs(model: str, small: list[str], tmp_path: Path) -> None:
    nodes = inspect(tmp_path, model, *small, "--key", "mixed:8", "--cudagraph-cut", "kv_gather")["nodes"]
    eager = [node for node in nodes if node["kind"] == "eager"]
    assert [(node["name"], node["layer"]) for node in eager] == [*(("kv_gather", n) for n in range(3)), ("head", None)]
    attention = [node for node in nodes if node["name"] == "ostinato.attention"]
    assert [(node["segment"], node["layer"]) for node in attention] == [(2, 0), (4, 1), (6, 2)]


def test_keys(model: str, small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", model, *small, "--keys"]) == 0
    out = capsys.readouterr().out
    for name in ("decode:1", "decode:2", "decode:4", "mixed:1", "mixed:32"):
        assert re.search(rf"^ {name} +(FULL|PIECEWISE) +\d+ +\d+ ", out, re.MULTILINE)
    assert "10 recordings, " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--key", "decode:3"], "--key decode:3: there is no such recording: did you mean decode:4?"),
        (["--key", "x"], "--keys lists what there is"),
        (["--segment", "9"], "--segment 9: decode:1 has segments 0 to 0"),
        (["--enforce-eager"], "nothing is recorded in mode NONE"),
        (["--dot", "/no/such/folder/x.dot"], "--dot /no/such/folder/x.dot: there is no folder"),
    ],
)
def test_errors(
    model: str, small: list[str], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", model, *small, *words]) == 2
    assert message in capsys.readouterr().err


def test_svg_needs_graphviz(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["inspect", "M", "--svg", "x.svg"]) == 2
    assert "--svg needs the program dot, which is not on the PATH" in capsys.readouterr().err


def test_svg_is_drawn_by_dot(model: str, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name which keeps what it is given."""
    tool = tmp_path / "dot"
    tool.write_text('#!/bin/sh\n[ "$1" = -Tsvg ] && [ "$2" = -o ] && exec cat > "$3"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    svg = tmp_path / "x.svg"
    assert main(["inspect", model, *small, "--svg", str(svg)]) == 0
    assert svg.read_text().startswith('digraph "decode:1, FULL on tape" {')


def test_a_replayed_recording_says_the_same(model: str) -> None:
    options = {"load_format": "dummy", "device": "cpu", "max_num_seqs": 2, "max_num_batched_tokens": 16}
    with LLM(model, max_model_len=32, cudagraph_capture_sizes=[1, 16], **options) as llm:
        store = llm.engine.runner.store
        for mode, key in ((RuntimeMode.FULL, BatchKey(1, 1, 1)), (RuntimeMode.PIECEWISE, BatchKey(16, 2, None))):
            before = recording_lines(store.get(mode, key), 3)
            store.replay(mode, key)
            assert recording_lines(store.get(mode, key), 3) == before


# -- layers ------------------------------------------------------------------------------------------------------------

HEAD, TAIL = ["prepare_kernel", "embed_kernel"], ["add", "rms_norm_kernel", "linear", "sample_kernel", "advance_kernel"]


def test_layers_by_the_distance_of_attention() -> None:
    layer = ["rms_norm_kernel", "linear", "decode_fused_kernel", "linear", "silu_mul_kernel", "linear"]
    names = [*HEAD, *layer * 4, *TAIL]
    assert layers_of(names, 4) == [None] * 2 + [0] * 6 + [1] * 6 + [2] * 6 + [3] * 6 + [None] * 5
    # of two kernels a layer the first one counts
    two = [*HEAD, *["linear", "decode_kernel", "decode_kernel", "linear"] * 3, *TAIL]
    assert layers_of(two, 3)[2:14] == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("names", "num_layers"),
    [
        ([*HEAD, *["linear", "decode_kernel", "linear"] * 3, *TAIL], 2),  # not as many for each layer
        ([*HEAD, "linear", "decode_kernel", "decode_kernel", "linear", "linear", "decode_kernel"], 3),  # distances
        ([*HEAD, *["linear"] * 5, "decode_kernel", "linear", "decode_kernel"], 2),  # more before it than a layer has
        (["prepare_kernel", *["linear", "decode_kernel"] * 2], 2),  # no embedding
        ([*HEAD, "linear", "decode_kernel", "linear"], 1),  # where does the only layer end?
        ([*HEAD, *TAIL], 2),
        ([], 2),
    ],
)
def test_layers_that_cannot_be_told(names: list[str], num_layers: int) -> None:
    assert layers_of(names, num_layers) == [None] * len(names)


# -- Graphviz ----------------------------------------------------------------------------------------------------------

STRING = r'"(?:[^"\\]|\\.)*"'
STATEMENTS = re.compile(
    rf"""digraph\ {STRING}\ \{{\n
    \ \ label={STRING};\ labelloc=t;\n
    \ \ node\ \[shape=box,\ fontname={STRING}\];\n
    (?:\ \ subgraph\ cluster_\d+\ \{{\n
    \ \ \ \ label={STRING};\n
    (?:\ \ \ \ n\d+\ \[label={STRING}(?:,\ style=dashed)?\];\n)+
    \ \ \}}\n)+
    (?:\ \ n\d+\ ->\ n\d+;\n)*
    \}}\n""",
    re.VERBOSE,
)


def test_dot_is_well_formed() -> None:
    lines = [
        Line(0, GraphNode(0, "kernel", 'void f<"x\\y">()', layer=3, grid=(4, 1, 1), block=(128, 1, 1))),
        Line(0, GraphNode(1, "memset", "memset", depends_on=(0,))),
        Line(1, GraphNode(2, "eager", "attention", depends_on=(1,))),
    ]
    text = to_dot(lines, 'a "title"')
    assert STATEMENTS.fullmatch(text)
    assert r'n0 [label="0 void f<\"x\\y\">()\nlayer 3\n4x1x1 blocks of 128x1x1"];' in text
    assert re.findall(r"n(\d+) -> n(\d+);", text) == [("0", "1"), ("1", "2")]
    assert "cluster_1" not in to_dot(lines[:2], "t")
    assert re.findall("->", to_dot(lines[1:], "t")) == ["->"]  # none from what is not shown
    assert totals(lines) == [("eager", "attention", 1), ("kernel", 'void f<"x\\y">()', 1), ("memset", "memset", 1)]


@pytest.mark.parametrize("key", ["decode:2", "mixed:16"])
def test_dot_of_a_recording(model: str, small: list[str], key: str, tmp_path: Path) -> None:
    file = tmp_path / "x.dot"
    nodes = inspect(tmp_path, model, *small, "--key", key, "--dot", str(file))["nodes"]
    text = file.read_text()
    assert STATEMENTS.fullmatch(text)
    assert len(re.findall(r"\[label=", text)) == len(nodes)
    edges = {(node["index"], before) for node in nodes for before in node["depends_on"]}
    assert {(int(after), int(before)) for before, after in re.findall(r"n(\d+) -> n(\d+);", text)} == edges
