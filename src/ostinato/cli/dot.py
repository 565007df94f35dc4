"""A recording as Graphviz text: a box for each node, a frame for each segment, an arrow for each dependency."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

from ostinato.cli.recording_lines import EAGER, Line

_NAME_WIDTH = 48


def to_dot(lines: Sequence[Line], title: str) -> str:
    """A digraph. Arrows from lines that are not among `lines` are left out."""
    out = [
        f"digraph {_quoted(title)} {{",
        f"  label={_quoted(title)}; labelloc=t;",
        '  node [shape=box, fontname="sans-serif"];',
    ]
    for segment, group in groupby(lines, key=lambda line: line.segment):
        members = list(group)
        is_eager = members[0].node.kind == EAGER
        title = f"segment {segment}: " + ("eager" if is_eager else "graph")
        out += [f"  subgraph cluster_{segment} {{", f"    label={_quoted(title)};"]
        for line in members:
            style = ", style=dashed" if is_eager else ""
            out.append(f"    n{line.node.index} [label={_quoted(_label(line))}{style}];")
        out.append("  }")
    shown = {line.node.index for line in lines}
    for line in lines:
        out += [f"  n{before} -> n{line.node.index};" for before in line.node.depends_on if before in shown]
    return "\n".join([*out, "}", ""])


def _label(line: Line) -> str:
    node = line.node
    name = node.name if len(node.name) <= _NAME_WIDTH else node.name[: _NAME_WIDTH - 3] + "..."
    text = f"{node.index} {name}"
    if node.layer is not None:
        text += f"\nlayer {node.layer}"
    if node.grid is not None and node.block is not None:
        text += f"\n{'x'.join(map(str, node.grid))} blocks of {'x'.join(map(str, node.block))}"
    return text


def _quoted(text: str) -> str:
    """A JSON string is a string of Graphviz's, with the same escapes for quotes, backslashes and line breaks."""
    return json.dumps(text, ensure_ascii=False)
