"""Time of the kernels of a decode step, by kind and by layer, from torch.profiler around steps of a running engine.

Kernels may overlap, so a kernel is attributed the time between the end of the one that ended before it and its own end;
these times add up to the step. Profiling makes a step slower: compare shares, and take times from bench decode.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ostinato.cli.bench import options, record
from ostinato.cli.options import integers
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError, OstinatoError
from ostinato.request import SamplingParams

if TYPE_CHECKING:
    from ostinato.cli.bench.kernel_times import KernelEvent
    from ostinato.cli.bench.tpot import Prompts
    from ostinato.engine.llm import LLM
    from ostinato.engine.output import Delta

_WARM_STEPS = 4
"""Decode steps before those that are profiled, and further ones that the profiler sees and that are dropped."""
_MARGIN = 16
_NAME_WIDTH = 64


def configure(parser: argparse.ArgumentParser) -> None:
    options.configure(parser, "profile", max_num_seqs="the largest batch")
    options.add_batch(parser, [1, 64])
    parser.add_argument(
        "--context", type=integers, default=[128], metavar="N,N", help="random ids of each prompt [128]"
    )
    parser.add_argument("--steps", type=int, default=32, metavar="N", help="decode steps of each case [32]")


def run(args: argparse.Namespace) -> int:
    base = options.base_options(args, args.batch)
    options.require_least(args, steps=1, context=1, batch=1)
    options.require_folder(args.json)
    from ostinato.cli.bench.kernel_times import FIRST_KERNEL, split_steps, summary
    from ostinato.cli.bench.subject import find_subject
    from ostinato.cli.bench.tpot import Prompts
    from ostinato.cli.session import open_llm
    from ostinato.progress import bar

    cases = [(batch, context) for batch in args.batch for context in args.context]
    tokens = EngineConfig.from_options(args.model, base).max_num_batched_tokens
    wanted = max(_num_tokens(batch, context, args.steps, tokens) for batch, context in cases)
    subject = find_subject(args, base, wanted, "--batch, --context and --steps")
    if subject.device.type != "cuda":
        raise ConfigError(f"bench profile times CUDA kernels, and this would run on {subject.device}: it needs a GPU")
    prompts, rows = Prompts(subject.vocab_size), []
    with open_llm(args.model, **subject.options) as llm, bar("profiling", len(cases)) as update:
        for batch, context in cases:
            events = _profile(llm, prompts, batch, context, args.steps)
            steps = split_steps(events)[_WARM_STEPS - 1 :]  # of the last one the profiler does not see the next
            if not steps:
                raise OstinatoError(
                    f"{len(events)} kernels ran, and they hold too few whole steps: each begins with {FIRST_KERNEL}"
                )
            rows.append({"batch": batch, "context": context} | summary(steps, subject.sizes.model_config.num_layers))
            update(len(rows), f"batch {batch}, {context} tokens")
        stats = llm.stats()
    report = record.head("profile", subject) | {
        "workload": {"num_steps": args.steps},
        "engine": record.engine_facts(stats),
        "results": rows,
    }
    record.write(args.json, report)
    _print(report)
    return 0


def _num_tokens(batch: int, context: int, num_steps: int, max_num_batched_tokens: int) -> int:
    """Of the longest request: while the last prompts are prefilled the first requests decode, one token a step."""
    num_prefill_steps = batch * context // max(max_num_batched_tokens - batch, 1) + 1
    return context + num_prefill_steps + num_steps + 2 * _WARM_STEPS + _MARGIN


def _profile(llm: LLM, prompts: Prompts, batch: int, context: int, num_steps: int) -> list[KernelEvent]:
    """Kernels of decode steps of `batch` requests whose prompts had `context` tokens."""
    engine = llm.engine
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=llm.stats().max_model_len - context, detokenize=False
    )
    names = [f"profile-{index}" for index in range(batch)]
    engine.settle()
    for name in names:
        engine.add_request(name, prompts.draw(context), params)
    try:
        warm = 0
        while warm < _WARM_STEPS:
            warm = warm + 1 if len(_step(llm)) == batch else 0
        with _collecting() as events:
            for _ in range(num_steps + _WARM_STEPS):
                if (alive := len(_step(llm))) != batch:
                    raise OstinatoError(
                        f"a profiled step served {alive} requests instead of {batch}: the KV cache does not hold "
                        f"{batch} times {context} tokens; lower --batch or --context"
                    )
        return events
    finally:
        for name in names:
            engine.abort(name)
        engine.settle()


def _step(llm: LLM) -> list[Delta]:
    deltas = llm.engine.step()
    if any(delta.finished for delta in deltas) or not llm.engine.has_unfinished:
        raise OstinatoError(
            "a request reached the end of the model length before all of them decoded in one step: the KV cache does "
            "not hold them; lower --batch or --context"
        )
    return deltas


@contextmanager
def _collecting() -> Iterator[list[KernelEvent]]:
    """All that runs on the device inside, in the list once the block has ended."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from ostinato.cli.bench.kernel_times import KernelEvent

    events: list[KernelEvent] = []
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield events
        torch.cuda.synchronize()
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            span = event.time_range
            events.append(KernelEvent(event.name, float(span.start), float(span.end - span.start)))


def _print(report: dict[str, Any]) -> None:
    from ostinato.cli.report import make_console, make_table

    console = make_console()
    record.print_head(report, console, f", mode {report['engine']['mode']}")
    for result in report["results"]:
        console.print(
            f"batch {result['batch']}, prompts of {result['context']}: {result['step_us']:.1f} us a step, then "
            f"{result['gap_us']:.1f} us until the next one, {result['staged_us']:.1f} of them for the host's "
            f"differences (medians of {result['num_steps']} steps)"
        )
        kinds = make_table("kernel", "calls", "us of the step", "duration us", "share")
        for row in result["kinds"]:
            times = (f"{row['attributed_us']:.1f}", f"{row['raw_us']:.1f}", f"{row['share']:.1%}")
            kinds.add_row(_shortened(row["name"]), f"{row['calls']:g}", *times)
        console.print(kinds)
        console.print(_describe_layers(result["layers"]), soft_wrap=True)


def _describe_layers(layers: dict[str, Any] | None) -> str:
    if layers is None:
        return "by layer: the kernels of attention are not as many for each layer"
    text = f"before the first attention {layers['before_us']:.1f} us, from the last one on {layers['after_us']:.1f} us"
    if not (times := layers["layers_us"]):
        return text
    middle = statistics.median(times)
    return f"{text}; from one to the next {min(times):.1f} / {middle:.1f} / {max(times):.1f} us (min / median / max)"


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 3] + "..."
