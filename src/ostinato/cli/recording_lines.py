"""A recording as one list of lines: the nodes of its graphs, and between them the eager calls at which it was cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from ostinato.cli.bench.kernel_times import attention_starts
from ostinato.graphs.nodes import GraphNode
from ostinato.graphs.recorder import GraphSegment, Recording

EAGER = "eager"
"""The kind of a line that is no node but a call between two graphs."""


class Line(NamedTuple):
    """`node.index` and `node.depends_on` count the lines of the whole recording."""

    segment: int
    node: GraphNode


def recording_lines(recording: Recording, num_layers: int) -> list[Line]:
    """In the order of a replay. A segment runs after the one before it, so what waits for nothing in its own segment
    depends on what nothing in the segment before waits for."""
    lines: list[Line] = []
    last: tuple[int, ...] = ()
    for number, segment in enumerate(recording.segments):
        first = len(lines)
        if isinstance(segment, GraphSegment):
            nodes: Sequence[GraphNode] = segment.graph.nodes()
        else:
            nodes = [GraphNode(0, EAGER, segment.name)]
        for node in nodes:
            before = tuple(first + index for index in node.depends_on) or last
            lines.append(Line(number, replace(node, index=first + node.index, depends_on=before)))
        needed = {index for line in lines[first:] for index in line.node.depends_on}
        last = tuple(index for index in range(first, len(lines)) if index not in needed)
    layers = layers_of([line.node.name for line in lines], num_layers)
    return [Line(line.segment, replace(line.node, layer=layer)) for line, layer in zip(lines, layers, strict=True)]


def layers_of(names: Sequence[str], num_layers: int) -> list[int | None]:
    """The layer of each launch of a step, None for those outside of all layers.

    Nothing in a graph says where a layer begins. The first one follows the embedding, and all layers launch the same
    number of kernels before their attention: so where attention comes at equal distances, one layer is one distance.
    Where it does not, nobody is told anything: all None.
    """
    none: list[int | None] = [None] * len(names)
    starts = attention_starts(names, num_layers)
    embeds = [index for index, name in enumerate(names) if "embed" in name]
    if starts is None or len(embeds) != 1 or embeds[0] > starts[0]:
        return none
    first, distances = embeds[0] + 1, {after - before for before, after in pairwise(starts)}
    if len(distances) > 1:
        return none
    # of a model with one layer it cannot be told where that layer ends
    length = distances.pop() if distances else 0
    end = first + length * num_layers
    if not starts[0] - first < length or end > len(names):
        return none
    return [(index - first) // length if first <= index < end else None for index in range(len(names))]


def totals(lines: Sequence[Line]) -> list[tuple[str, str, int]]:
    """(kind, name, how many), the commonest first."""
    counts = Counter((line.node.kind, line.node.name) for line in lines)
    return [(*what, count) for what, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
