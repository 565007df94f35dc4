"""Command-line options that stand for fields of `EngineConfig` and `SamplingParams`.

The tables below hold one entry per field; defaults live in the dataclasses alone, so only what was typed is passed on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ostinato.config import (
    ATTENTION_BACKENDS,
    AUTO,
    CAPTURES,
    DTYPES,
    KV_CACHE_DTYPES,
    LADDERS,
    LOAD_FORMATS,
    EngineConfig,
)
from ostinato.errors import ConfigError
from ostinato.graphs.mode import LAYER_CUTS, CUDAGraphMode
from ostinato.request import SamplingParams, StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class Option:
    """One field as a flag. `parse` of None is a switch, which gets a `--no-` twin."""

    field: str
    parse: Callable[[str], Any] | None
    help: str
    metavar: str = "N"
    flag: str | None = None
    repeat: bool = False

    @property
    def name(self) -> str:
        return self.flag or "--" + self.field.replace("_", "-")


def integers(text: str) -> list[int]:
    """`1,2,4`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,2,4") from None


def capture_sizes(text: str) -> list[int] | dict[str, list[int]] | str:
    """`1,2,4` for both kinds of batches; `1,2,4/64,512` for uniform ones, in requests, and mixed ones, in tokens."""
    if text == AUTO:  # refused later, with what to do instead
        return text
    parts = text.split("/")
    if len(parts) == 1:
        return integers(text)
    if len(parts) > 2 or not any(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1,2,4, nor two such as 1,2,4/64,512")
    return {name: integers(part) for name, part in zip(LADDERS, parts, strict=True) if part}


def words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def biases(text: str) -> dict[int, float]:
    """`50:2.5,198:-100`."""
    try:
        return {int(token): float(value) for token, _, value in (part.partition(":") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of id:bias pairs such as 50:2.5,198:-100") from None


def structure(text: str) -> StructuredOutputsParams:
    """`{"choice": ["yes", "no"]}`: the fields of StructuredOutputsParams as a JSON object."""
    try:
        fields = json.loads(text)
        return StructuredOutputsParams(**fields)
    except (ValueError, TypeError, ConfigError) as error:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a structure such as {{"choice": ["yes", "no"]}} or {{"regex": "[0-9]+"}}: {error}'
        ) from None


def json_object(text: str) -> dict[str, Any]:
    """`{"kv_connector": "OffloadingConnector"}`."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


ENGINE_OPTIONS = (
    Option("device", str, "cpu, cuda or cuda:1; CUDA where it is", "NAME"),
    Option("dtype", str, f"of weights, activations and KV: {', '.join(DTYPES)}", "NAME"),
    Option("kv_cache_dtype", str, f"of the KV cache: {', '.join(KV_CACHE_DTYPES)}", "NAME"),
    Option("calculate_kv_scales", None, "FP8 KV: set scales by the first prompt where the checkpoint has none"),
    Option("load_format", str, f"{', '.join(LOAD_FORMATS)} (random weights)", "NAME"),
    Option("max_model_len", int, "tokens of prompt and output together; the model's limit"),
    Option("max_num_seqs", int, "requests that run at once; the ladder of recorded batches ends here"),
    Option("max_num_batched_tokens", int, "tokens of one step; longer prompts run in chunks"),
    Option("block_size", int, "tokens of one KV block"),
    Option("num_gpu_blocks_override", int, "KV blocks, instead of filling the memory budget"),
    Option("gpu_memory_utilization", float, "share of the device that the engine may take", "F"),
    Option("enable_prefix_caching", None, "reuse the KV of equal prompt beginnings"),
    Option("enforce_eager", None, "no graphs and no compile"),
    Option("attention_backend", str, f"of prompts: {', '.join(ATTENTION_BACKENDS)}", "NAME"),
    Option("capture", str, f"when graphs are recorded: {', '.join(CAPTURES)}", "WHEN"),
    Option("cudagraph_mode", str, ", ".join(CUDAGraphMode.__members__), "MODE"),
    Option("cudagraph_cut", str, f"where PIECEWISE cuts a layer: {', '.join(LAYER_CUTS)}", "PLACE"),
    Option(
        "cudagraph_capture_sizes",
        capture_sizes,
        "batch sizes to record instead of the default ladder; 1,2/8,64: requests of uniform, tokens of mixed batches",
        "1,2,4",
    ),
    Option("kv_transfer_config", json_object, "connector that KV comes from and goes to", "JSON"),
    Option("max_in_flight", int, "steps launched before one is collected: 1 or 2"),
    Option("compile", None, "torch.compile over the functions of a layer"),
    Option("batch_invariant", None, "the same bits for a request whatever runs beside it; slower, not with --compile"),
    Option("enable_layerwise_nvtx_tracing", None, "NVTX ranges by layer, for Nsight (CUDA)"),
    Option("seed", int, "engine seed: requests without a seed of their own, and dummy weights", flag="--engine-seed"),
    Option("check", int, "compare the first N replays of every key with an eager run, bit for bit"),
    Option("poison", None, "with --check: NaN in all that a live row must not read"),
)
"""Every field of EngineConfig but `model`. `seed` alone has another name: `--seed` is a request's, as for sampling."""

SAMPLING_OPTIONS = (
    Option("n", int, "answers to each prompt"),
    Option("max_tokens", int, "tokens of an answer"),
    Option("min_tokens", int, "no stop before this many tokens"),
    Option("temperature", float, "0 is greedy", "F"),
    Option("top_p", float, "keep the likeliest tokens that add up to this probability", "F"),
    Option("top_k", int, "keep this many likeliest tokens; 0 keeps all"),
    Option("min_p", float, "keep tokens of at least this share of the likeliest one's probability", "F"),
    Option("repetition_penalty", float, "above 1 discourages tokens of prompt and answer", "F"),
    Option("presence_penalty", float, "above 0 discourages tokens of the answer", "F"),
    Option("frequency_penalty", float, "the same, by how often they came", "F"),
    Option("seed", int, "makes each request's draws repeatable"),
    Option("stop", str, "text that ends an answer; may be given several times", "TEXT", repeat=True),
    Option("stop_token_ids", integers, "token ids that end an answer", "1,2"),
    Option("ignore_eos", None, "go on after the end-of-sequence token"),
    Option("include_stop_str_in_output", None, "keep the stop text"),
    Option("logprobs", int, "log-probabilities of this many likeliest tokens (with --json)"),
    Option("prompt_logprobs", int, "the same for the prompt (with --json)"),
    Option("logit_bias", biases, "added to the logits of these token ids", "ID:F,..."),
    Option("detokenize", None, "make text of the tokens"),
    Option("skip_special_tokens", None, "leave special tokens out of the text"),
    Option("structured_outputs", structure, "what the output must look like, with llguidance", "JSON"),
)
"""Every field of SamplingParams."""


def add_options(
    parser: argparse.ArgumentParser,
    title: str,
    options: tuple[Option, ...],
    defaults: type[EngineConfig] | type[SamplingParams],
    **own_defaults: Any,
) -> None:
    """`own_defaults`: what a command passes where nothing was typed, for the help text only."""
    values = {field.name: field.default for field in dataclasses.fields(defaults)} | own_defaults
    group = parser.add_argument_group(title)
    for option in options:
        default = values[option.field]
        text = option.help if default is None or option.parse is None else f"{option.help} [{default}]"
        kwargs: dict[str, Any] = {"dest": _dest(option), "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        if option.parse is None:
            switch = f"{option.help} [{'on' if default else 'off'}]"
            group.add_argument(option.name, action=argparse.BooleanOptionalAction, **kwargs | {"help": switch})
        else:
            kwargs |= {"type": option.parse, "metavar": option.metavar}
            group.add_argument(option.name, action="append" if option.repeat else "store", **kwargs)


def add_engine_options(parser: argparse.ArgumentParser, **own_defaults: Any) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, a .gguf file, or smollm2")
    add_options(parser, "engine options", ENGINE_OPTIONS, EngineConfig, **own_defaults)


def add_sampling_options(parser: argparse.ArgumentParser, **own_defaults: Any) -> None:
    add_options(parser, "sampling options", SAMPLING_OPTIONS, SamplingParams, **own_defaults)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were typed, by field name."""
    return _typed(args, ENGINE_OPTIONS)


def sampling_params(args: argparse.Namespace, **own_defaults: Any) -> SamplingParams:
    """Raises ConfigError for a value out of range."""
    return SamplingParams(**own_defaults | _typed(args, SAMPLING_OPTIONS))


_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}


def byte_size(text: str) -> int:
    """`80GiB`, `80GB`, `141e9`: bytes. Raises ConfigError for anything else."""
    number = text.strip().rstrip("BKMGTi")
    unit = text.strip().removeprefix(number)
    try:
        size = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigError(f"{text!r} is not a size: write 80GiB, 80GB or a number of bytes")
    return size


def _dest(option: Option) -> str:
    return option.name.removeprefix("--").replace("-", "_")


def _typed(args: argparse.Namespace, options: tuple[Option, ...]) -> dict[str, Any]:
    given = vars(args)
    return {option.field: given[_dest(option)] for option in options if _dest(option) in given}
