"""What an engine has done, as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ostinato.engine.stats import EngineStats, MemoryStat
    from ostinato.graphs.dispatch import BatchKey, StepCount


def make_console(file: IO[str] | None = None) -> Console:
    """Wide where the output is not a terminal, so that tables in a file or a log are not folded."""
    from rich.console import Console

    console = Console(file=file, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 120
    return console


def make_table(*columns: str, title: str | None = None) -> Table:
    """The first column to the left, the others, which hold numbers, to the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def describe_key(key: BatchKey | None) -> str:
    if key is None:
        return "-"
    if key.query_len is None:
        return f"{key.num_tokens} tokens"
    rows = f"{key.num_rows} row{'s' if key.num_rows != 1 else ''}"
    return rows if key.query_len == 1 else f"{rows} x {key.query_len}"


def steps_table(steps: Sequence[StepCount]) -> Table:
    """Steps by (mode, key, reason). Padded tokens count all that was computed, live ones included."""
    table = make_table("mode", "key", "steps", "live tokens", "padded tokens", "reason", title="steps")
    table.columns[-1].justify = "left"
    for step in steps:
        numbers = (str(step.count), str(step.live_tokens), str(step.padded_tokens))
        table.add_row(step.mode, describe_key(step.key), *numbers, step.reason)
    if steps:
        table.add_section()
        sums = (sum(s.count for s in steps), sum(s.live_tokens for s in steps), sum(s.padded_tokens for s in steps))
        table.add_row("all", "", *map(str, sums), "")
    return table


def describe_memory(memory: MemoryStat) -> str:
    """`weights 2.30 GiB + KV 1.00 GiB + ...`, and on a GPU what the device says."""
    names = ("before", "weights", "kv", "graphs", "buffers", "libraries")
    parts = [(name, getattr(memory, name)) for name in names if getattr(memory, name)]
    text = " + ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    if memory.free is None or memory.total is None or memory.unaccounted is None:
        return text
    return (
        f"{text} + free {format_bytes(memory.free)} = {format_bytes(memory.total - memory.unaccounted)} of "
        f"{format_bytes(memory.total)}"
    )


def print_stats(stats: EngineStats, console: Console) -> None:
    """Mode and backend, steps, KV blocks and start-up: everything `LLM.stats` has to say."""
    console.print(
        f"mode {stats.resolved_mode} on the {stats.backend} backend ({stats.device}, {stats.dtype}), attention "
        f"of prompts {stats.attention_backend}; "
        f"{stats.num_recordings} recordings in {stats.capture_s:.2f} s, {format_bytes(stats.recording_bytes)}"
    )
    if stats.num_checked:
        console.print(f"checked: {stats.num_checked} replays equal an eager run bit for bit")
    console.print(steps_table(stats.steps))
    total, hit = stats.num_blocks - 1, stats.prefix_hit_tokens // stats.block_size
    console.print(
        f"KV: {total} blocks of {stats.block_size} tokens, {total - stats.free_blocks} held by requests, "
        f"{stats.cached_blocks} with content that can be reused; {hit} blocks ({stats.prefix_hit_tokens} tokens) hit "
        f"by prefix, {stats.preemptions} preemptions"
    )
    console.print(f"memory: {describe_memory(stats.memory)}")
    parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in stats.startup_s.items())
    console.print(f"start-up: {parts}")


def format_bytes(count: float) -> str:
    """`1.24 GiB`, `96 B`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1000 and len(units) > 1:
        count /= 1024
        del units[0]
    return f"{count:.2f} {units[0]}" if count < 100 and units[0] != "B" else f"{count:.0f} {units[0]}"
