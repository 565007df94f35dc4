"""The model that is measured: its engine options, its device, its sizes. Found before anything is loaded."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.cli.bench.options import with_context
from ostinato.cli.footprint import Footprint, footprint
from ostinato.config import EngineConfig
from ostinato.engine.resolve import resolve_device


@dataclass(frozen=True, slots=True)
class Subject:
    """`options` are those of the engine."""

    model: str
    options: dict[str, Any]
    device: torch.device
    sizes: Footprint
    command_line: list[str]

    @property
    def vocab_size(self) -> int:
        return self.sizes.model_config.vocab_size


def find_subject(args: argparse.Namespace, options: dict[str, Any], num_tokens: int, why: str) -> Subject:
    """For sequences of `num_tokens`, which the options named in `why` ask for. Raises ConfigError or WeightError where
    `LLM` would."""
    device = resolve_device(options.get("device"))
    options = with_context(args.model, options, num_tokens, why)
    sizes = footprint(EngineConfig.from_options(args.model, options), device.type)
    return Subject(args.model, options, device, sizes, args.command_line)
