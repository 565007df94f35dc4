"""The JSON of a measurement: one head for all of them, without paths or names of the machine."""

from __future__ import annotations

import dataclasses
import json
import shlex
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from ostinato.cli.bench.subject import Subject
    from ostinato.engine.stats import EngineStats


def head(benchmark: str, subject: Subject) -> dict[str, Any]:
    """What was measured, with what, on what. Called after the measurement: asking a CUDA device takes memory of it."""
    from ostinato.cli.environment import describe_environment

    sizes = subject.sizes
    return {
        "benchmark": benchmark,
        "command": shlex.join(portable(word) for word in subject.command_line),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": describe_environment(subject.device),
        "model": {**dataclasses.asdict(sizes.model_config), "name": Path(subject.model).name, "dtype": sizes.dtype},
        "engine_options": subject.options,
        "weight_bytes_per_step": sizes.read_bytes,
        "kv_bytes_per_token": sizes.kv_token_bytes,
    }


def portable(word: str) -> str:
    """A word of a command line with the folders of an absolute path left out: they say something about one machine."""
    option, equals, value = word.partition("=")
    if equals and option.startswith("--"):
        return f"{option}={portable(value)}"
    return Path(word).name if word.startswith(("/", "~")) else word


def engine_facts(stats: EngineStats) -> dict[str, Any]:
    """What the engine decided and what its start took."""
    return {
        "mode": stats.resolved_mode,
        "backend": stats.backend,
        "attention_backend": stats.attention_backend,
        "capture_s": stats.capture_s,
        "num_recordings": stats.num_recordings,
        "recording_bytes": stats.recording_bytes,
        "num_blocks": stats.num_blocks,
        "kv_cache_dtype": stats.kv_cache_dtype,
        "startup_s": stats.startup_s,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """`spread` is from the least to the most."""
    least, most = min(values), max(values)
    return {"min": least, "median": statistics.median(values), "max": most, "spread": most - least}


def write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def print_head(report: dict[str, Any], console: Console, further: str = "") -> None:
    where, model = report["environment"], report["model"]
    console.print(
        f"{model['name']} ({model['dtype']}) on {where['device_name'] or where['device']}, torch {where['torch']}, "
        f"triton {where['triton']}{further}"
    )
