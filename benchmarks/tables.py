"""A comparison as tables for people: one block per model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ostinato.cli.report import make_console, make_table

Row = tuple[str, float | None, float | None, bool]
"""What, ours, the peer's, whether more is better."""


def print_report(report: dict[str, Any]) -> None:
    console = make_console()
    sitting, rate = report["sitting"], report["bandwidth"]["read_tb_s"]
    gpu = ", ".join(sitting["gpus"] or ["no GPU found"])
    console.print(
        f"{gpu}, driver {sitting['driver']}, reads {rate} TB/s; sitting {sitting['id'][:8]} of {sitting['time']}"
    )
    for entry in report["models"]:
        ours, peer = entry["ostinato"] or {}, entry["peer"]
        name = "peer" if peer is None else str(peer.get("peer", "peer"))
        console.print(f"\n{entry['name']}: Ostinato and {name}; ratio above 1: Ostinato is so many times faster")
        _print_decode(console.print, ours, peer or {}, name)
        _print_rest(console.print, ours, peer or {}, name)
        _print_modes(console.print, ours)
        for title, half in (("Ostinato", ours), (name, peer or {})):
            for what, error in errors_of(half).items():
                console.print(f"{title} failed ({what}): {error.strip().splitlines()[-1] if error.strip() else '?'}")


def errors_of(half: dict[str, Any]) -> dict[str, str]:
    """The text of every failure in a half, by what failed."""
    found = {what: part["error"] for what, part in half.items() if isinstance(part, dict) and "error" in part}
    return found | ({"run": half["error"]} if "error" in half else {})


def _print_decode(say: Callable[..., None], ours: dict[str, Any], peer: dict[str, Any], name: str) -> None:
    mine = {row["batch"]: row for row in _get(ours, "decode", "timings") or []}
    theirs = {row["batch"]: row for row in peer.get("timings") or []}
    if not (batches := sorted(mine | theirs)):
        return
    table = make_table(
        "batch",
        "TPOT ms",
        "median",
        "spread",
        f"{name} ms",
        "median",
        "spread",
        "ratio",
        "floor ms",
        "of floor",
        "idle",
    )
    for batch in batches:
        a, b = mine.get(batch, {}), theirs.get(batch, {})
        times = (_number(half.get(key)) for half in (a, b) for key in ("tpot_min_ms", "tpot_median_ms", "spread_ms"))
        ratio = _ratio(b.get("tpot_min_ms"), a.get("tpot_min_ms"))
        shares = (_percent(a.get("floor_share")), _percent(a.get("idle_share"), 1))
        table.add_row(str(batch), *times, ratio, _number(a.get("floor_ms")), *shares)
    say(table)


def _print_rest(say: Callable[..., None], ours: dict[str, Any], peer: dict[str, Any], name: str) -> None:
    prefill = (_get(ours, "prefill", "timings") or [{}])[0]
    rows: list[Row] = [
        (
            f"TTFT of {prefill.get('prompt_len') or _get(peer, 'prefill', 'prompt_len')} tokens, ms",
            _get(prefill, "ttft_ms", "min"),
            _get(peer, "prefill", "ttft_ms", "min"),
            False,
        ),
        (
            "throughput, output tokens/s",
            _get(ours, "throughput", "output_tokens_per_s", "median"),
            _get(peer, "throughput", "output_tokens_per_s", "median"),
            True,
        ),
        (
            "process start to first token, s",
            _get(ours, "startup", "first_token_s", "median"),
            peer.get("first_token_s"),
            False,
        ),
    ]
    table = make_table("", "Ostinato", name, "ratio")
    for what, mine, theirs, more_is_better in rows:
        if mine is not None or theirs is not None:
            ratio = _ratio(mine, theirs) if more_is_better else _ratio(theirs, mine)
            table.add_row(what, _number(mine), _number(theirs), ratio)
    if table.rows:
        say(table)


def _print_modes(say: Callable[..., None], ours: dict[str, Any]) -> None:
    if not (results := _get(ours, "modes", "results")):
        return
    batches = [timing["batch"] for timing in results[0]["timings"]]
    table = make_table("mode", *(f"batch {batch}, ms" for batch in batches), "recordings", "capture s")
    for result in results:
        times = (_number(timing["tpot_min_ms"]) for timing in result["timings"])
        table.add_row(result["mode"], *times, str(result["num_recordings"]), f"{result['capture_s']:.2f}")
    say(table)


def _get(tree: dict[str, Any], *names: str) -> Any:
    """What lies at the end of a path of keys, None where the path breaks off."""
    found: Any = tree
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _number(value: float | None) -> str:
    return (
        "-"
        if value is None
        else f"{value:,.0f}"
        if value >= 1000
        else f"{value:.3f}"
        if value < 100
        else f"{value:.1f}"
    )


def _percent(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def _ratio(over: float | None, under: float | None) -> str:
    return "-" if over is None or not under else f"{over / under:.2f}"
