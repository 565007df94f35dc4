"""What it takes to begin from KV in host memory, and what others notice of it.

    python benchmarks/kv_transfer.py benchmarks/shapes/llama-8b --out FILE

One engine with random weights and `OffloadingConnector`. Two parts (`--parts`):

ttft  time to the first token of a prompt of `--prompt-len` tokens that runs alone: computed, loaded from host memory,
      and found in the pool (the floor). With `full-pool`, every block that it takes holds content that has to go to
      host memory first; without, none does.
tpot  time between tokens of `--batch` requests while such a prompt arrives beside them: a window of `--window` steps
      with one arrival against the window right before it, and the steps from the arrival to the newcomer's first token
      alone. Whatever the mean over the window is, it depends on how many steps one arrival is shared by.

`--load` is the connector's option: by a step that waits layer by layer (sync), beside the steps (async), or as it suits
what else runs (auto): alone by the step, beside others not. Each row of `tpot` says which it was (`loaded_by`).

What was to be loaded was loaded, and nothing else was, or the measurement fails. FILE is written after each case.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import sitting
from decoding import Decoding, UnexpectedError
from kv_offload import Answer, Offload, Step, StepList, open_offload
from ostinato.cli.bench.record import engine_facts, portable, spread
from ostinato.cli.environment import describe_environment
from ostinato.engine.output import OutputState
from ostinato.errors import OstinatoError

BOUND: Final = 1.1
"""What the time between tokens may grow by while another request loads."""
SAME: Final = "same_tokens_as_in_the_pool"
"""Field of a report: a load that changed a bit of KV could show here."""
SETTLE: Final = 4
"""Steps between a change and a window: the pipeline is full again."""


@dataclass(frozen=True, slots=True)
class Case:
    """`loads`: from host memory. `full`: every free block holds content that host memory lacks."""

    name: str
    loads: bool
    full: bool


CASES: Final = (
    Case("recompute", False, False),
    Case("load", True, False),
    Case("recompute, full pool", False, True),
    Case("load, full pool", True, True),
)


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(words)
    if args.rounds < 3 or args.window < 2 or args.batch < 1:
        raise SystemExit("kv_transfer: at least --rounds 3, --window 2 and --batch 1")
    report: dict[str, Any] = {
        "benchmark": "kv_transfer",
        "shape": args.shape.name,
        "command": shlex.join(["python", "benchmarks/kv_transfer.py", *map(portable, words)]),
        "sitting": sitting.stamp(sitting.new_id()),
        "workload": {
            name: getattr(args, name) for name in ("prompt_len", "batch", "context", "window", "rounds", "full_rounds")
        },
        "bound": BOUND,
        "ttft": [],
        "tpot": [],
    }
    try:
        measure(args, report)
    except (OstinatoError, UnexpectedError) as error:
        report["error"] = str(error)
        print(f"kv_transfer: {error}", file=sys.stderr)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if "engine" in report:
        print("\n".join(lines(report)))
    return int("error" in report)


def measure(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Adds to the report, and writes it, as it goes. Raises OstinatoError or UnexpectedError."""
    shape = json.loads((args.shape / "config.json").read_text())
    began = time.perf_counter()
    running = args.context + _most_steps(args) + 1
    num_blocks = 1 + args.batch * (-(-running // args.block_size) + 4) + -(-args.prompt_len // args.block_size) + 1
    with open_offload(
        args.shape,
        device=args.device,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        block_size=args.block_size,
        max_model_len=max(args.prompt_len + _answer_len(args), running) + 1,
        max_num_seqs=args.max_num_seqs or args.batch + 16,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_gpu_blocks_override=num_blocks,
        cudagraph_mode=args.cudagraph_mode,
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": int(args.host_gib * (1 << 30)),
                "wait": args.wait,
                "load": args.load,
            },
        },
    ) as llm:
        stats = llm.stats()
        assert stats.connector is not None
        report |= {
            "dtype": stats.dtype,
            "environment": describe_environment(llm.engine.runner.state.arena.device),
            "engine": engine_facts(stats)
            | {"wait": args.wait, "load": args.load, "host_blocks": stats.connector.capacity_blocks},
            "started_s": time.perf_counter() - began,
        }
        offload = Offload(llm, shape["num_hidden_layers"], shape["vocab_size"])
        prompt = offload.draw(args.prompt_len)
        first = offload.ask(prompt, _answer_len(args))
        device = offload.ask(prompt, _answer_len(args))
        _expect(device.cached_tokens, device.loaded_blocks, _cacheable(args), 0, "the prompt again, at once")
        offload.evict_all(args.prompt_len)
        if "ttft" in args.parts:
            for row in ttft(args, offload, prompt, first, device):
                report["ttft"].append(row)
                keep(args, report, began)
        if "tpot" in args.parts:
            for case in CASES:
                report["tpot"].append(tpot(args, offload, prompt, case))
                keep(args, report, began)
        report["blocks_saved"] = offload.num_saved()
    pool_step = runs_as(device.steps)  # a load that waits by hooks may run as another one
    if wrong := [row["case"] for row in report["ttft"] if row.get(SAME) is False and row["runs_as"] == pool_step]:
        raise UnexpectedError(f"{', '.join(wrong)}: other tokens than after finding the same prompt in the pool")


def keep(args: argparse.Namespace, report: dict[str, Any], began: float) -> None:
    report["seconds"] = time.perf_counter() - began
    args.out.write_text(json.dumps(report, indent=1) + "\n")


def _answer_len(args: argparse.Namespace) -> int:
    """Tokens of an answer in part `ttft`: enough to compare."""
    return int(args.block_size + 8)


def _cacheable(args: argparse.Namespace) -> int:
    """Tokens of the prompt that can be found: full blocks, and never the last token."""
    return int((args.prompt_len - 1) // args.block_size * args.block_size)


def _rounds(args: argparse.Namespace, case: Case) -> int:
    return int(args.full_rounds if case.full else args.rounds)


def _expect(cached: int, loaded: int, cached_due: int, loaded_due: int, what: str) -> None:
    """Tokens that were found and blocks that were loaded. Raises UnexpectedError unless they are those that are due."""
    if (cached, loaded) != (cached_due, loaded_due):
        raise UnexpectedError(
            f"{what}: {cached} tokens were found and {loaded} blocks came from host memory; {cached_due} and "
            f"{loaded_due} were due (is --host-gib large enough?)"
        )


# -- time to the first token -------------------------------------------------------------------------------------------


def ttft(
    args: argparse.Namespace, offload: Offload, prompt: list[int], first: Answer, device: Answer
) -> Iterator[dict[str, Any]]:
    """A row for each case and one for the prompt in the pool. `first` computed the prompt; `device` found it in the
    pool: a load that runs as the same step does so over the same KV, so their tokens are the same ones."""
    floor: list[Answer] = []
    computed: dict[bool, float] = {}
    for case in CASES:
        answers = []
        for number in range(1 + _rounds(args, case)):  # the first compiles what is still to be
            answer = _ask_case(args, offload, prompt, case)
            if case.loads and not case.full:
                again = offload.ask(prompt, _answer_len(args))
                _expect(again.cached_tokens, again.loaded_blocks, _cacheable(args), 0, "the loaded prompt again")
                floor += [again] if number else []
            answers += [answer] if number else []
        row = _ttft_row(case.name, answers)
        if not case.loads:
            computed[case.full] = row["ttft_ms"]["median"]
        else:
            row["of_recompute"] = row["ttft_ms"]["median"] / computed[case.full]
            row[SAME] = all(answer.token_ids == device.token_ids for answer in answers)
            row["same_tokens_as_computed"] = all(answer.token_ids == first.token_ids for answer in answers)
        yield row
        if floor and case.loads and not case.full:
            yield _ttft_row("in the pool", floor)


def _ask_case(args: argparse.Namespace, offload: Offload, prompt: list[int], case: Case) -> Answer:
    offload.forget()
    if case.full:
        offload.fill_all(args.prompt_len)
    found = _cacheable(args) if case.loads else 0
    answer = offload.ask(prompt if case.loads else offload.draw(args.prompt_len), _answer_len(args))
    _expect(answer.cached_tokens, answer.loaded_blocks, found, found // args.block_size, case.name)
    if bool(answer.saved_bytes) != case.full:
        raise UnexpectedError(f"{case.name}: {answer.saved_bytes} bytes were saved to host memory")
    return answer


def _ttft_row(name: str, answers: Sequence[Answer]) -> dict[str, Any]:
    row: dict[str, Any] = {"case": name, "ttft_ms": spread([answer.ttft_s * 1e3 for answer in answers])}
    row |= {"tokens_found": answers[0].cached_tokens, "runs_as": runs_as(answers[0].steps)}
    if answers[0].loaded_bytes:
        row |= {"loaded_blocks": answers[0].loaded_blocks, "loaded_bytes": answers[0].loaded_bytes}
        row["load_ms"] = spread([answer.load_s * 1e3 for answer in answers])
        row["load_gb_s"] = spread([answer.loaded_bytes / answer.load_s / 1e9 for answer in answers])
    if answers[0].saved_bytes:
        row["saved_bytes"] = answers[0].saved_bytes
        row["save_ms"] = spread([answer.save_s * 1e3 for answer in answers])
        row["save_gb_s"] = spread([answer.saved_bytes / answer.save_s / 1e9 for answer in answers])
    return row | {"rounds": [answer.facts() for answer in answers]}


def runs_as(steps: Sequence[Step]) -> str:
    """`PIECEWISE mixed:16`, or `5 x NONE` where several steps gave the first token."""
    names: dict[str, int] = {}
    for step in steps:
        name = " ".join(filter(None, (step.mode, step.key)))
        names[name] = names.get(name, 0) + 1
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in names.items())


# -- time between tokens -----------------------------------------------------------------------------------------------


def with_arrival(
    decoding: Decoding, offload: Offload, prompt: list[int], count: int
) -> tuple[list[float], int, float, OutputState]:
    """At least `count` times between tokens, as long as the newcomer has none, which arrives right before the first of
    them; how many passed until it had; the seconds until then; the newcomer."""
    began = time.perf_counter()
    newcomer = offload.add(prompt, 1)
    times: list[float] = []
    until, ttft_s = 0, 0.0
    while len(times) < count or not until:
        times.append(decoding.tick())
        if newcomer.request.finished and not until:
            until, ttft_s = len(times), time.perf_counter() - began
    return times, until, ttft_s, newcomer


def _most_steps(args: argparse.Namespace) -> int:
    """Tokens that a request that decodes may come to have in a case; `Decoding.stop` finds out if they are too few."""
    arrival = -(-args.prompt_len // (args.max_num_batched_tokens - args.batch)) + SETTLE
    if args.load != "sync":
        arrival = max(arrival, args.window)  # of steps beside a load
    plain = 2 * args.window + arrival + 2 * SETTLE
    steps = (1 + args.rounds) * plain
    fillers = 3 + args.batch * steps // args.prompt_len  # the room of the newcomer, and what the others will grow into
    return int(max(steps, (1 + args.full_rounds) * (plain + fillers * arrival)))


def tpot(args: argparse.Namespace, offload: Offload, prompt: list[int], case: Case) -> dict[str, Any]:
    """A row for the report."""
    preemptions = offload.llm.stats().preemptions
    rounds, ran = [], []
    with offload.observed() as seen:
        offload.forget()
        prompts = [offload.draw(args.context) for _ in range(args.batch)]
        decoding = Decoding(offload.engine, prompts, _most_steps(args))
        for number in range(1 + _rounds(args, case)):
            done = _tpot_round(args, decoding, offload, seen, prompt, case)
            if number:  # the first compiles what is still to be
                rounds.append(done)
                ran.append(done.pop("runs_as"))
        context = decoding.mean_context()
        decoding.stop()
    if offload.llm.stats().preemptions != preemptions:
        raise UnexpectedError(f"{case.name}: a request was preempted")
    before = [ms for done in rounds for ms in done["before_ms"]]
    overlap = [ms for done in rounds for ms in done["window_ms"][: done["overlap_steps"]]]
    ways = {done["loaded_by"] for done in rounds}
    if len(ways) != 1:
        raise UnexpectedError(f"{case.name}: loaded now by a step, now beside the steps")
    return {
        "case": case.name,
        "loaded_by": ways.pop(),
        "runs_as": sorted(set(ran)),
        "last_context": context,
        "before": summary(before),
        "window": summary([ms for done in rounds for ms in done["window_ms"][: args.window]]),
        "overlap": summary(overlap),
        "overlap_steps": spread([done["overlap_steps"] for done in rounds]),
        "newcomer_ttft_ms": spread([done["newcomer_ttft_ms"] for done in rounds]),
        "window_ratio": spread([done["window_ratio"] for done in rounds]),
        "overlap_ratio": spread([done["overlap_ratio"] for done in rounds]),
        "rounds": rounds,
    }


def _tpot_round(
    args: argparse.Namespace, decoding: Decoding, offload: Offload, seen: StepList, prompt: list[int], case: Case
) -> dict[str, Any]:
    offload.forget()
    if case.full:
        for filler in offload.fillers(args.prompt_len):
            while not filler.request.finished:
                decoding.tick()
    arriving = prompt if case.loads else offload.draw(args.prompt_len)
    loaded, loads = offload.num_loaded(), offload.num_async()
    decoding.ticks(SETTLE)
    before = [seconds * 1e3 for seconds in decoding.ticks(args.window)]
    first_step = len(seen.steps)
    times, until, ttft_s, newcomer = with_arrival(decoding, offload, arriving, args.window)
    window = [seconds * 1e3 for seconds in times]
    mine = [step for step in seen.steps[first_step:] if step.rows > args.batch]
    begins = [step for step in seen.steps[first_step:] if step.async_loads]
    found = _cacheable(args) if case.loads else 0
    blocks = offload.num_loaded() - loaded
    _expect(newcomer.request.num_cached_tokens, blocks, found, found // args.block_size, f"{case.name}, tpot")
    loaded_by = _loaded_by(args, case, offload.num_async() - loads)
    saves = sum(step.saves for step in {id(step): step for step in (*begins, *mine)}.values())
    if (saves > 0) != case.full:
        raise UnexpectedError(f"{case.name}: {saves} blocks were saved to host memory")
    usual = statistics.fmean(before)
    return {
        "before_ms": before,
        "window_ms": window,
        "overlap_steps": until,
        "newcomer_ttft_ms": ttft_s * 1e3,
        "loaded_blocks": blocks,
        "loaded_by": loaded_by,
        "saved_blocks": saves,
        "window_ratio": statistics.fmean(window[: args.window]) / usual,
        "overlap_ratio": statistics.fmean(window[:until]) / usual,
        "runs_as": runs_as(mine),
    }


def _loaded_by(args: argparse.Namespace, case: Case, num_async: int) -> str | None:
    """Raises UnexpectedError for another way than was asked for."""
    if args.load != "auto" and num_async != (case.loads and args.load == "async"):
        raise UnexpectedError(f"{case.name}, --load {args.load}: {num_async} loads beside the steps")
    if not case.loads:
        return None
    return "async" if num_async else "step"


def summary(values: Sequence[float]) -> dict[str, float]:
    """`p90`: of all values, the least that nine in ten do not exceed."""
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "mean_ms": statistics.fmean(ordered),
        "median_ms": statistics.median(ordered),
        "p90_ms": ordered[math.ceil(0.9 * len(ordered)) - 1],
        "max_ms": ordered[-1],
    }


# -- for people --------------------------------------------------------------------------------------------------------


def lines(report: dict[str, Any]) -> list[str]:
    """Two tables."""
    work, engine, where = report["workload"], report["engine"], report["environment"]
    told = [
        f"{report['shape']}, {report['dtype']}, KV {engine['kv_cache_dtype']}, "
        f"{where['device_name'] or where['device']}, mode {engine['mode']}, wait {engine['wait']}, "
        f"load {engine['load']}; "
        f"{report.get('seconds', 0.0):.0f} s"
    ]
    if report["ttft"]:
        told.append(
            f"prompt of {work['prompt_len']}, alone".ljust(24)
            + f" {'TTFT ms':>8} {'least':>8} {'most':>8} {'found':>6} {'load ms':>8} {'GB/s':>6}  first token by"
        )
    for row in report["ttft"]:
        took, load = row["ttft_ms"], ("", "")
        if "load_ms" in row:
            load = (f"{row['load_ms']['median']:.2f}", f"{row['load_gb_s']['median']:.1f}")
        told.append(
            f"  {row['case']:<22} {took['median']:8.2f} {took['min']:8.2f} {took['max']:8.2f} {row['tokens_found']:6} "
            f"{load[0]:>8} {load[1]:>6}  {row['runs_as']}"
        )
        for name in (SAME, "same_tokens_as_computed"):
            if row.get(name) is False:
                told.append(f"    {name.replace('_', ' ')}: no")
    if report["tpot"]:
        heads = ("usual ms", f"{work['window']} steps", "ratio", "overlap", "median", "p90", "ratio")
        told.append(f"{work['batch']} decode, one arrives".ljust(24) + "".join(f" {head:>9}" for head in heads))
    for row in report["tpot"]:
        over = row["overlap"]
        told.append(
            f"  {row['case']:<22} {row['before']['mean_ms']:9.3f} {row['window']['mean_ms']:9.3f} "
            f"{row['window_ratio']['median']:9.3f} {row['overlap_steps']['median']:9.0f} {over['median_ms']:9.3f} "
            f"{over['p90_ms']:9.3f} {row['overlap_ratio']['median']:9.2f}  "
            + ("async load, then " if row["loaded_by"] == "async" else "")
            + ", ".join(row["runs_as"])
        )
    return told


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, help="a folder with config.json")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", help="cpu or cuda; without it CUDA where it is")
    parser.add_argument("--parts", type=_parts, default=["ttft", "tpot"], metavar="A,B", help="[ttft,tpot]")
    parser.add_argument("--prompt-len", type=int, default=8192, help="tokens of the prompt [8192]")
    parser.add_argument("--rounds", type=int, default=5, help="of each case, at least 3 [5]")
    parser.add_argument("--full-rounds", type=int, default=3, help="of each case with a full pool [3]")
    parser.add_argument("--batch", type=int, default=16, help="requests that decode [16]")
    parser.add_argument("--context", type=int, default=1024, help="tokens of their prompts [1024]")
    parser.add_argument("--window", type=int, default=50, help="steps of a window [50]")
    parser.add_argument("--host-gib", type=float, default=8.0, help="host memory [8]")
    parser.add_argument("--wait", default="events", help="events, hooks or step [events]")
    parser.add_argument("--load", choices=("auto", "sync", "async"), default="auto", help="[auto]")
    parser.add_argument("--cudagraph-mode", default="FULL_AND_PIECEWISE", metavar="MODE", help="[FULL_AND_PIECEWISE]")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto or fp8 [auto]")
    parser.add_argument("--block-size", type=int, default=16, help="[16]")
    parser.add_argument("--max-num-seqs", type=int, help="[batch + 16]")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="[2048]")
    return parser


def _parts(text: str) -> list[str]:
    names = text.split(",")
    if not names or not set(names) <= {"ttft", "tpot"}:
        raise argparse.ArgumentTypeError(f"{text!r}: must be ttft, tpot or both")
    return names


if __name__ == "__main__":
    sys.exit(main())
