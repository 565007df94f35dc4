"""The operators of a tape, their arguments and what each waits for."""

from __future__ import annotations

import torch
from tests.graphs.conftest import Bench

from ostinato.graphs.recorder import Cut, GraphSegment
from ostinato.graphs.tape import TapeBackend


def test_operators_with_shapes_and_dependencies() -> None:
    tape = Bench(TapeBackend())
    x, out = tape.zeros("x", 2, 3), tape.zeros("out", 2, 4)

    def step(cut: Cut) -> None:
        y = x + 1  # 0
        out[:, :2].copy_(y[:, :2])  # 1: reads 0 through a view, writes out
        z = torch.empty(2, 3)  # does no work
        torch.mul(y, 2.5, out=z)  # 2: does not touch what 1 writes
        x.copy_(z)  # 3: writes what 0 has read
        out[0, 3:].add_(x[0, :1])  # 4

    recording = tape.recorder.record(step)
    [segment] = recording.segments
    assert isinstance(segment, GraphSegment)
    nodes = segment.graph.nodes()
    assert [node.index for node in nodes] == [0, 1, 2, 3, 4]
    assert [node.name for node in nodes] == [
        "aten.add.Tensor",
        "aten.copy_",
        "aten.mul.out",
        "aten.copy_",
        "aten.add_.Tensor",
    ]
    assert {node.kind for node in nodes} == {"operator"}
    assert nodes[0].detail.startswith("float32[2,3], 1")
    assert nodes[0].detail.endswith("-> float32[2,3]")
    assert nodes[1].detail == "float32[2,2]!, float32[2,2]"
    assert nodes[3].detail == "float32[2,3]!, float32[2,3]"
    assert [node.depends_on for node in nodes] == [(), (0,), (0,), (0, 2), (1, 3)]
    recording.replay()
    assert segment.graph.nodes() == nodes  # the trace itself has gone
    assert len(nodes) == segment.graph.num_nodes
