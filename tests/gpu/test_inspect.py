"""What `ostinato inspect` tells of a CUDA graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ostinato.cli.main import main

from .conftest import ModelFactory


def inspect(path: Path, tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "nodes.json"
    options = ["--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--dtype", "bfloat16"]
    assert main(["inspect", str(path), "--device", "cuda", *options, *words, "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_whole_step(small_model: ModelFactory, device: torch.device, tmp_path: Path) -> None:
    """Every node is there, kernels with their names, grids and registers, in an order that respects their edges."""
    dot = tmp_path / "graph.dot"
    facts = inspect(small_model().path, tmp_path, "--key", "decode:2", "--dot", str(dot))
    assert (facts["key"], facts["mode"], facts["backend"]) == ("decode:2", "FULL", "cuda")
    nodes = facts["nodes"]
    kernels = [node for node in nodes if node["kind"] == "kernel"]
    assert len(kernels) >= 8
    names = [node["name"] for node in kernels]
    assert (names[0], names[-1]) == ("prepare_kernel", "advance_kernel")
    assert [node["layer"] for node in kernels if "decode" in node["name"]] == [0, 1]
    for node in kernels:
        assert all(size >= 1 for size in node["grid"]), node
        assert node["registers"] > 0, node
    assert all(before < node["index"] for node in nodes for before in node["depends_on"])
    assert sum(bool(node["depends_on"]) for node in nodes) >= len(nodes) - 1
    text = dot.read_text()
    assert text.count("->") >= len(nodes) - 1


def test_a_cut_recording(small_model: ModelFactory, device: torch.device, tmp_path: Path) -> None:
    facts = inspect(small_model().path, tmp_path, "--key", "mixed:8")
    eager = [node["name"] for node in facts["nodes"] if node["kind"] == "eager"]
    assert eager.count("attention") == 2
    assert any(node["kind"] == "kernel" for node in facts["nodes"])
