"""Time per output token against batch size: one PNG for each model in results of `compare.py`.

python benchmarks/plot.py RESULT.json ... --out DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from sitting import MixedSittingsError, load

OURS, PEER, FLOOR = "#0b5fa5", "#c4561b", "#555555"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DIR")
    args = parser.parse_args(argv)
    if not args.out.is_dir():
        parser.error(f"--out {args.out}: there is no such folder")
    try:
        entries = drawable([load(path) for path in args.results])
    except (MixedSittingsError, OSError) as error:
        print(f"plot.py: error: {error}", file=sys.stderr)
        return 2
    for sitting, entry in entries:
        path = args.out / f"tpot-{entry['name']}.png"
        draw(sitting, entry, path)
        print(path)
    return 0


def drawable(reports: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(sitting, entry) of every model that has timings. Raises MixedSittingsError for a model in two results."""
    entries = [(report["sitting"], entry) for report in reports for entry in report["models"]]
    names = [entry["name"] for _, entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise MixedSittingsError(f"{', '.join(twice)}: in more than one result, and one picture shows one sitting")
    return [
        (sitting, entry) for sitting, entry in entries if (entry["ostinato"] or {}).get("decode", {}).get("timings")
    ]


def series(entry: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """(batch, ms) by what a line shows, the fastest runs."""
    ours = entry["ostinato"]["decode"]["timings"]
    peer = entry["peer"] or {}
    lines = {"Ostinato": [(row["batch"], row["tpot_min_ms"]) for row in ours]}
    lines[str(peer.get("peer", "peer"))] = [(row["batch"], row["tpot_min_ms"]) for row in peer.get("timings", [])]
    lines["floor"] = [(row["batch"], row["floor_ms"]) for row in ours if row["floor_ms"] is not None]
    return {title: sorted(points) for title, points in lines.items() if points}


def draw(sitting: dict[str, Any], entry: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    lines, decode = series(entry), entry["ostinato"]["decode"]
    figure, axes = pyplot.subplots(figsize=(7.0, 4.4), dpi=160, layout="constrained")
    for title, points in lines.items():
        batches, times = zip(*points, strict=True)
        label = "floor: bytes a step must read / read bandwidth" if title == "floor" else title
        style: dict[str, Any] = {"color": PEER, "marker": "s"}
        if title == "Ostinato":
            style = {"color": OURS, "marker": "o"}
        elif title == "floor":
            style = {"color": FLOOR, "linestyle": "--", "linewidth": 1.5}
        axes.plot(batches, times, **{"linewidth": 2.2, "markersize": 6} | style, label=label)
        below = title in ("Ostinato", "floor")
        for batch, time in points:
            offset: dict[str, Any] = {"xytext": (0, -13 if below else 7), "textcoords": "offset points", "ha": "center"}
            axes.annotate(f"{time:.2f}", (batch, time), color=style["color"], fontsize=9, **offset)
    ticks = sorted({batch for points in lines.values() for batch, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(batch) for batch in ticks])
    low = min(time for points in lines.values() for _, time in points)
    high = max(time for points in lines.values() for _, time in points)
    steps = [step for power in range(-4, 5) for step in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)]
    shown = [step for step in steps if low / 2.5 <= step <= high * 2.5]
    axes.set_yticks(shown, [f"{step:g}" for step in shown])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(low / 1.5, high * 1.5)
    axes.set_xlim(ticks[0] / 1.35, ticks[-1] * 1.35)
    axes.set_xlabel("batch (requests that decode together)", fontsize=11)
    axes.set_ylabel("ms per output token", fontsize=11)
    work, where = decode["workload"], ", ".join(sitting["gpus"] or [decode["environment"]["device"]])
    shape = f"{entry['name']}, {decode['model']['dtype']}, {work['prompt_len']} tokens in, {work['output_len']} out"
    axes.set_title(f"{shape}, {where}", fontsize=11)
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.legend(fontsize=10, frameon=False, loc="upper left")
    figure.savefig(path, facecolor="white")
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
