"""Memory and recordings of a model, before it is loaded: needs no GPU, reads no weights."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ostinato.cli.options import add_engine_options, byte_size, engine_options
from ostinato.config import EngineConfig
from ostinato.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from ostinato.cli.footprint import Footprint

DEFAULT_OVERHEAD = "1GiB"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ostinato plan [OPTIONS] MODEL"
    add_engine_options(parser)
    parser.add_argument("--memory", metavar="SIZE", help="of the CUDA device to plan for, such as 80GiB")
    parser.add_argument(
        "--overhead",
        metavar="SIZE",
        default=DEFAULT_OVERHEAD,
        help=f"to leave for the CUDA context and the graphs, which only a start measures [{DEFAULT_OVERHEAD}]",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    config = EngineConfig.from_options(args.model, engine_options(args))
    memory_bytes = None if args.memory is None else byte_size(args.memory)
    overhead = byte_size(args.overhead)
    if memory_bytes is not None and config.device == "cpu":
        raise ConfigError("--memory is a CUDA device's: leave out --device cpu")

    from ostinato.cli.footprint import footprint

    if memory_bytes is None:
        memory_bytes = _device_bytes(config.device)
    sizes = footprint(config, "cpu" if memory_bytes is None else "cuda")
    num_blocks = _num_blocks(config, sizes, memory_bytes, overhead)
    facts = _facts(config, sizes, memory_bytes, overhead, num_blocks)
    if args.json:
        print(json.dumps(facts))
    else:
        _print(facts)
    return 0


def _device_bytes(device: str | None) -> int | None:
    """Memory of the CUDA device that the engine would take; None where it would take the CPU."""
    import torch

    if device == "cpu":
        return None
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.device(device or "cuda")).total_memory)
    if device is not None:
        raise ConfigError(f"--device {device}, and torch sees no CUDA device: say with --memory how much it has")
    return None


def _num_blocks(config: EngineConfig, sizes: Footprint, memory_bytes: int | None, overhead: int) -> int:
    """KV blocks, the reserved one included. Raises CapacityError where one request of full length does not fit."""
    a_row = -(-sizes.max_model_len // config.block_size)
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    block_bytes = sizes.kv_token_bytes * config.block_size
    if memory_bytes is None:
        from ostinato.runner.memory import CPU_KV_BYTES

        return 1 + max(a_row, min(a_row * config.max_num_seqs, CPU_KV_BYTES // block_bytes))
    budget = int(memory_bytes * config.gpu_memory_utilization)
    gathered = f", {sizes.gather_bytes >> 20} MiB of them for cudagraph_cut='kv_gather'" if sizes.gather_bytes else ""
    lower = "--max-num-seqs, --max-model-len" if sizes.gather_bytes else "--max-model-len"
    left = budget - sizes.fixed_bytes - overhead
    if left < (1 + a_row) * block_bytes:
        raise CapacityError(
            f"{budget >> 20} MiB ({config.gpu_memory_utilization} of {memory_bytes >> 20} MiB) do not hold "
            f"{sizes.fixed_bytes >> 20} MiB of weights, state, buffers and activations{gathered}, "
            f"{overhead >> 20} MiB overhead and {(1 + a_row) * block_bytes >> 20} MiB of KV for one request of "
            f"{sizes.max_model_len} tokens: lower {lower} or --max-num-batched-tokens, or take a larger device"
        )
    return left // block_bytes


def _facts(
    config: EngineConfig, sizes: Footprint, memory_bytes: int | None, overhead: int, num_blocks: int
) -> dict[str, Any]:
    tokens = (num_blocks - 1) * config.block_size
    return {
        "model": config.model,
        "model_type": sizes.model_config.model_type,
        "num_parameters": sizes.model_config.num_parameters(),
        "device": "cpu" if memory_bytes is None else "cuda",
        "dtype": sizes.dtype,
        "kv_cache_dtype": sizes.kv_cache_dtype,
        "max_model_len": sizes.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "weight_bytes": sizes.weight_bytes,
        "state_bytes": sizes.state_bytes,
        "buffer_bytes": sizes.buffer_bytes,
        "gather_bytes": sizes.gather_bytes or None,
        "activation_bytes_estimate": sizes.activation_bytes,
        "overhead_bytes": None if memory_bytes is None else overhead,
        "memory_bytes": memory_bytes,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "cudagraph_mode": config.resolved_mode.value,
        "cudagraph_cut": config.cudagraph_cut,
        "uniform_sizes": list(sizes.uniform_sizes),
        "mixed_sizes": list(sizes.mixed_sizes),
        "num_recordings": sizes.num_recordings,
        "block_size": config.block_size,
        "kv_bytes_per_token": sizes.kv_token_bytes,
        "num_blocks": num_blocks,
        "kv_bytes": num_blocks * config.block_size * sizes.kv_token_bytes,
        "kv_tokens": tokens,
        "max_concurrency": round(tokens / sizes.max_model_len, 2),
    }


def _print(facts: dict[str, Any]) -> None:
    from ostinato.cli.report import format_bytes, make_console, make_table

    console, table = make_console(), make_table("memory", "bytes", "")
    rows = [
        ("weights", "weight_bytes"),
        ("request state", "state_bytes"),
        ("step buffers", "buffer_bytes"),
        ("gathered K and V (kv_gather)", "gather_bytes"),
        ("activations (estimate)", "activation_bytes_estimate"),
        ("context and graphs (assumed)", "overhead_bytes"),
        (f"KV cache, {facts['num_blocks']} blocks of {facts['block_size']} tokens", "kv_bytes"),
    ]
    present = [(name, facts[key]) for name, key in rows if facts[key] is not None]
    for name, size in [*present, ("all", sum(size for _, size in present))]:
        if name == "all":
            table.add_section()
        table.add_row(name, f"{size:,}", format_bytes(size))
    console.print(
        f"{facts['model']}: {facts['model_type']}, {facts['num_parameters']:,} parameters, "
        f"{facts['dtype']} on {facts['device']}"
    )
    console.print(table)
    if facts["memory_bytes"] is not None:
        share, size = facts["gpu_memory_utilization"], facts["memory_bytes"]
        console.print(f"budget: {share} of {format_bytes(size)} = {format_bytes(share * size)}")
    console.print(
        f"KV: {facts['kv_cache_dtype']}, {facts['kv_bytes_per_token']:,} bytes per token, "
        f"{facts['kv_tokens']:,} tokens fit"
    )
    console.print(f"concurrency: {facts['max_concurrency']} requests of {facts['max_model_len']} tokens")
    console.print(f"mode {facts['cudagraph_mode']}: {facts['num_recordings']} recordings")
    for name, unit in (("uniform_sizes", "requests"), ("mixed_sizes", "tokens")):
        if facts[name]:
            sizes = ", ".join(map(str, facts[name]))
            console.print(f"  {name.removesuffix('_sizes')} batches, in {unit}: {sizes}", soft_wrap=True)
