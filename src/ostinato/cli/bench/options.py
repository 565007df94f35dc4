"""Options and checks that the measurements share. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ostinato.cli.options import add_engine_options, engine_options, integers
from ostinato.cli.parser import UsageError
from ostinato.errors import ConfigError

MAX_CONTEXT = 4096
"""Model length where none is asked for: long prompts are not measured, and the split of attention depends on it."""

AUTO = "auto"


def configure(
    parser: argparse.ArgumentParser, name: str, *, runs: int | None = None, runs_help: str = "", **engine_defaults: Any
) -> None:
    """The model, the options of the engine, `--runs` where it has a default, and `--json`."""
    parser.usage = f"ostinato bench {name} [OPTIONS] MODEL"
    defaults = {"enable_prefix_caching": False, "max_model_len": MAX_CONTEXT} | engine_defaults
    add_engine_options(parser, **defaults)
    if runs is not None:
        parser.add_argument("--runs", type=int, default=runs, metavar="N", help=f"{runs_help} [{runs}]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")


def add_batch(parser: argparse.ArgumentParser, default: list[int], what: str = "batch sizes") -> None:
    shown = ",".join(map(str, default))
    parser.add_argument("--batch", type=integers, default=default, metavar="1,8", help=f"{what} [{shown}]")


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """Of the measurements of time per output token."""
    parser.add_argument("--prompt-len", type=int, default=128, metavar="N", help="random ids of each prompt [128]")
    parser.add_argument("--output-len", type=int, default=129, metavar="N", help="tokens of the longer runs [129]")


def add_bandwidth(parser: argparse.ArgumentParser) -> None:
    text = "of reading memory, or auto to measure it (CUDA): adds the floor of a step"
    parser.add_argument("--bandwidth", type=bandwidth, metavar="TB/s", help=text)


def bandwidth(text: str) -> float | str:
    """`4.5` or `auto`."""
    if text == AUTO:
        return AUTO
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number of TB/s above 0")
    return value


# -- checks ------------------------------------------------------------------------------------------------------------


def require_least(args: argparse.Namespace, **least: int) -> None:
    """Each named option, a number or a list of them, is at least so much."""
    for name, limit in least.items():
        value = getattr(args, name)
        values = value if isinstance(value, list) else [value]
        if min(values) < limit:
            shown = ",".join(map(str, values))
            raise ConfigError(f"--{name.replace('_', '-')} {shown}: must be at least {limit}")


def require_folder(path: Path | None) -> None:
    """Found out before anything is measured rather than after it."""
    if path is not None and not path.resolve().parent.is_dir():
        raise ConfigError(f"--json {path}: there is no folder {path.resolve().parent}")


def base_options(args: argparse.Namespace, batches: Sequence[int] = ()) -> dict[str, Any]:
    """The engine's options: what was typed over the benchmark's own defaults."""
    own: dict[str, Any] = {"enable_prefix_caching": False}
    if batches:
        own["max_num_seqs"] = max(batches)
    options = own | engine_options(args)
    if options["enable_prefix_caching"]:
        raise UsageError("--enable-prefix-caching: a prompt found in the cache would spoil the time of its first token")
    if batches and options["max_num_seqs"] < max(batches):
        raise UsageError(
            f"--max-num-seqs {options['max_num_seqs']} is below --batch {max(batches)}, which would never run as one"
        )
    return options


def with_context(model: str, options: dict[str, Any], wanted: int, why: str) -> dict[str, Any]:
    """With the model length set, and found long enough for sequences of `wanted` tokens; `why` says what takes them."""
    if "max_model_len" not in options:
        from ostinato.models.config import parse_config
        from ostinato.weights.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(model, options.get("load_format", "auto"))
        limit = parse_config(checkpoint.config).max_position_embeddings
        options = options | {"max_model_len": min(limit, max(MAX_CONTEXT, wanted))}
    if options["max_model_len"] < wanted:
        raise ConfigError(f"{why} need a model length of {wanted}, and it is {options['max_model_len']}: lower them")
    return options
