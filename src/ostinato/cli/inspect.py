"""What a recording holds: the nodes of its graphs in order, the eager calls between them, and totals.

On CUDA the driver is asked about each node of the captured graph; on the CPU the operators of the tape are listed, with
a `!` after each argument that is written in place. The layer is told where attention comes at equal distances.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.cli.options import add_engine_options, engine_options
from ostinato.errors import ConfigError, OstinatoError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostinato.cli.recording_lines import Line
    from ostinato.graphs.store import StoredRecording


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ostinato inspect [OPTIONS] MODEL"
    add_engine_options(parser)
    parser.add_argument("--keys", action="store_true", help="list the recordings, and show none")
    parser.add_argument(
        "--key", metavar="KEY", help="which recording: decode:8 (requests) or mixed:512 (tokens) [the smallest decode]"
    )
    parser.add_argument("--segment", type=int, metavar="N", help="only this segment, counted from 0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the nodes as JSON")
    parser.add_argument("--dot", type=Path, metavar="FILE", help="write nodes and dependencies as Graphviz text")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw that with the program dot of Graphviz")


def run(args: argparse.Namespace) -> int:
    _check_files(args)
    from ostinato.cli.recording_lines import recording_lines
    from ostinato.cli.session import open_llm

    with open_llm(args.model, **engine_options(args)) as llm:
        runner, backend = llm.engine.runner, llm.stats().backend
        table = sorted(runner.store.table(), key=lambda line: line.key)
        if not table:
            raise ConfigError("nothing is recorded in mode NONE: leave out --enforce-eager, or take another mode")
        if args.keys:
            _print_keys(table)
            return 0
        chosen = _choose(table, args.key)
        lines = recording_lines(runner.store.get(chosen.mode, chosen.key), runner.model.config.num_layers)
    if args.segment is not None:
        last = lines[-1].segment
        lines = [line for line in lines if line.segment == args.segment]
        if not lines:
            raise ConfigError(f"--segment {args.segment}: {chosen.key.name} has segments 0 to {last}")
    head = f"{chosen.key.name}, {chosen.mode.value} on {backend}"
    _print(lines, chosen, head)
    _write(args, lines, chosen, head, backend)
    return 0


def _check_files(args: argparse.Namespace) -> None:
    """Found out before anything is built rather than after it."""
    for option in ("json", "dot", "svg"):
        path: Path | None = getattr(args, option)
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"--{option} {path}: there is no folder {path.resolve().parent}")
    if args.svg is not None and shutil.which("dot") is None:
        raise ConfigError(
            "--svg needs the program dot, which is not on the PATH: install Graphviz, or write --dot FILE"
        )


def _choose(table: Sequence[StoredRecording], name: str | None) -> StoredRecording:
    """`table` is sorted by key. Raises ConfigError that names what there is."""
    if name is None:
        return next((line for line in table if line.key.query_len is not None), table[0])
    for line in table:
        if line.key.name == name:
            return line
    near = difflib.get_close_matches(name, [line.key.name for line in table], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "--keys lists what there is"
    raise ConfigError(f"--key {name}: there is no such recording: {hint}")


def _print_keys(table: Sequence[StoredRecording]) -> None:
    from ostinato.cli.report import format_bytes, make_console, make_table

    view = make_table("key", "mode", "graphs", "nodes", "bytes", "seconds")
    for line in table:
        numbers = (str(line.num_graphs), str(line.num_nodes), f"{line.bytes:,}", f"{line.capture_s:.4f}")
        view.add_row(line.key.name, line.mode.value, *numbers)
    console = make_console()
    console.print(view)
    size, seconds = sum(line.bytes for line in table), sum(line.capture_s for line in table)
    console.print(f"{len(table)} recordings, {format_bytes(size)}, {seconds:.2f} s")


def _print(lines: Sequence[Line], chosen: StoredRecording, head: str) -> None:
    from ostinato.cli.recording_lines import totals
    from ostinato.cli.report import make_console, make_table

    console, is_cuda = make_console(), any(line.node.grid is not None for line in lines)
    launch = ("grid", "block", "registers", "shared bytes") if is_cuda else ()
    table = make_table("#", "segment", "layer", "kind", "name", *launch, "detail")
    for column in (table.columns[3], table.columns[4], table.columns[-1]):
        column.justify = "left"
    for column in (table.columns[4], table.columns[-1]):
        column.no_wrap, column.overflow = False, "fold"
    for segment, node in lines:
        facts = (_dim(node.grid), _dim(node.block), _number(node.registers), _number(node.shared_bytes))
        table.add_row(
            str(node.index),
            str(segment),
            _number(node.layer),
            node.kind,
            node.name,
            *(facts if is_cuda else ()),
            node.detail,
        )
    console.print(table)
    sums = make_table("kind", "name", "nodes", title="totals")
    sums.columns[1].justify = "left"
    for kind, name, count in totals(lines):
        sums.add_row(kind, name, str(count))
    console.print(sums)
    console.print(
        f"{head}: graphs {chosen.num_graphs}, nodes {chosen.num_nodes}, {chosen.bytes:,} bytes, "
        f"recorded in {chosen.capture_s:.4f} s"
    )


def _dim(size: tuple[int, int, int] | None) -> str:
    return "" if size is None else "x".join(map(str, size))


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _write(args: argparse.Namespace, lines: Sequence[Line], chosen: StoredRecording, head: str, backend: str) -> None:
    from ostinato.cli.dot import to_dot

    if args.json is not None:
        args.json.write_text(json.dumps(_facts(lines, chosen, backend), indent=1) + "\n")
    if args.dot is None and args.svg is None:
        return
    text = to_dot(lines, head)
    if args.dot is not None:
        args.dot.write_text(text)
    if args.svg is not None:
        drawn = subprocess.run(
            ["dot", "-Tsvg", "-o", str(args.svg)], input=text, text=True, capture_output=True, check=False
        )
        if drawn.returncode:
            raise OstinatoError(f"dot could not draw the recording: {drawn.stderr.strip()}")


def _facts(lines: Sequence[Line], chosen: StoredRecording, backend: str) -> dict[str, Any]:
    return {
        "key": chosen.key.name,
        "mode": chosen.mode.value,
        "backend": backend,
        "num_graphs": chosen.num_graphs,
        "num_nodes": chosen.num_nodes,
        "bytes": chosen.bytes,
        "seconds": chosen.capture_s,
        "nodes": [{"segment": line.segment} | dataclasses.asdict(line.node) for line in lines],
    }
