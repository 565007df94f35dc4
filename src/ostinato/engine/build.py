"""The only place that wires: from an EngineConfig to a running Engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ostinato.config import EngineConfig
from ostinato.engine.engine import Engine
from ostinato.errors import ConfigError
from ostinato.graphs.backends import GraphBackend
from ostinato.graphs.buckets import mixed_ladder, uniform_ladder, worst_padding
from ostinato.graphs.dispatch import Dispatcher
from ostinato.graphs.mode import CUDAGraphMode, RuntimeMode
from ostinato.models.config import ModelConfig, parse_config
from ostinato.models.decoder import Decoder
from ostinato.models.weights import allocate, check_names, destinations, fill, fill_random
from ostinato.runner import memory
from ostinato.runner.checker import StepChecker
from ostinato.runner.inputs import StepBuffers
from ostinato.runner.layout import ArenaLayout
from ostinato.runner.runner import Runner
from ostinato.runner.state import RequestState
from ostinato.sampling.grammar import GrammarCompiler
from ostinato.scheduler import Scheduler
from ostinato.weights.base import Checkpoint
from ostinato.weights.checkpoint import open_checkpoint

logger = logging.getLogger("ostinato")

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, how much is done, how much there is)."""


@dataclass(slots=True)
class Built:
    """An engine and what was decided on the way. `seconds` per start-up part."""

    engine: Engine
    config: EngineConfig
    model_config: ModelConfig
    pool: memory.KVPool
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    uniform_sizes: tuple[int, ...]
    mixed_sizes: tuple[int, ...]
    device_bytes: int | None  # None on the CPU, which is not the engine's alone
    seconds: dict[str, float] = field(default_factory=dict)


def build(config: EngineConfig, progress: Progress | None = None) -> Built:
    """Raises ConfigError, WeightError or CapacityError before anything is recorded."""
    clock = _Clock()
    device = resolve_device(config.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton launches on the current device, whatever its arguments are on
    checkpoint = open_checkpoint(config.model, config.load_format)
    model_config = parse_config(checkpoint.config)
    dtype = resolve_dtype(config.dtype, model_config, device)
    max_model_len = resolve_max_model_len(config, model_config)
    uniform, mixed = resolve_ladders(config)
    max_in_flight = config.max_in_flight or (2 if device.type == "cuda" else 1)
    clock.lap("config")

    model = load_model(config, checkpoint, model_config, dtype, device, max_model_len)
    clock.lap("weights")
    tokenizer = checkpoint.tokenizer()
    clock.lap("tokenizer")

    layout = ArenaLayout(
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        table_width=-(-max_model_len // config.block_size),
        vocab_size=model_config.vocab_size,
    )
    state = RequestState(layout, model_config.vocab_size, device)
    buffers = StepBuffers(
        model_config,
        max_rows=config.max_num_seqs,
        max_tokens=config.max_num_batched_tokens,
        ring_depth=max_in_flight + 1,
        dtype=dtype,
        device=device,
    )
    pool = _make_pool(config, model_config, dtype, device, max_model_len)
    runner = Runner(
        model=model,
        storage=pool.storage,
        state=state,
        buffers=buffers,
        backend=make_backend(device),
        dispatcher=Dispatcher(config.resolved_mode, uniform, mixed, config.max_num_seqs),
        block_size=config.block_size,
        max_in_flight=max_in_flight,
    )
    clock.lap("buffers")
    transient = _warm_up(runner, device)
    clock.lap("warm-up")
    runner.record(None if progress is None else lambda done, total: progress("recording", done, total))
    clock.lap("recording")
    if pool.range is not None:
        memory.map_rest(
            pool,
            utilization=config.gpu_memory_utilization,
            transient_bytes=transient,
            num_blocks=config.num_gpu_blocks_override,
            min_blocks=1 + layout.table_width,
        )
    clock.lap("kv")

    scheduler = Scheduler(
        num_blocks=pool.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    if config.check:
        checker = StepChecker(
            num_replays=config.check,
            poison=config.poison,
            state=state,
            buffers=buffers,
            storage=pool.storage,
            block_size=config.block_size,
            free_blocks=scheduler.kv.empty_blocks,
        )
        runner.enable_check(checker)
        if config.poison:
            pool.storage.fill_blocks(range(pool.num_blocks), float("nan"))
    vocab_size = model_config.vocab_size
    eos = _eos_token_ids(checkpoint, tokenizer.eos_token_ids if tokenizer else frozenset())
    engine = Engine(
        scheduler=scheduler,
        runner=runner,
        tokenizer=tokenizer,
        grammars=None if tokenizer is None else GrammarCompiler(tokenizer, vocab_size, eos),
        eos_token_ids=eos,
        vocab_size=vocab_size,
        max_in_flight=max_in_flight,
        seed=config.seed,
    )
    clock.lap("scheduler")
    built = Built(
        engine=engine,
        config=config,
        model_config=model_config,
        pool=pool,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        uniform_sizes=uniform,
        mixed_sizes=mixed,
        device_bytes=torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None,
        seconds=clock.seconds,
    )
    _report(built)
    return built


# -- choices -----------------------------------------------------------------------------------------------------------


def resolve_device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but torch sees no CUDA device; use device='cpu' or leave it out")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name!r}, but there are {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_dtype(name: str, model_config: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        if device.type == "cpu":
            name = "float32"
        else:
            name = model_config.dtype if model_config.dtype in ("float16", "bfloat16") else "bfloat16"
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]


def resolve_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(f"max_model_len={config.max_model_len} is above the model's {limit} positions")
    return config.max_model_len


def resolve_ladders(config: EngineConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(uniform sizes in requests, mixed sizes in tokens) that this mode records."""
    mode, sizes = config.resolved_mode, config.cudagraph_capture_sizes
    rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
    uniform: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    if mode.mixed_mode() is not RuntimeMode.NONE:
        mixed = mixed_ladder(tokens, sizes)
    if mode.decode_mode() is RuntimeMode.FULL:
        # a user's list counts tokens for mixed batches too, and may go on above the rows
        own = None if sizes is None else [size for size in sizes if size <= rows]
        if sizes is not None and not own:
            raise ConfigError(f"cudagraph_capture_sizes={list(sizes)}: none is at most max_num_seqs={rows}")
        uniform = uniform_ladder(rows, own)
    return uniform, mixed


def make_backend(device: torch.device) -> GraphBackend:
    if device.type == "cuda":
        from ostinato.graphs.cuda import CudaBackend

        return CudaBackend(device)
    from ostinato.graphs.tape import TapeBackend

    return TapeBackend()


def load_model(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
) -> Decoder:
    weights = allocate(model_config, dtype, device)
    if config.load_format == "dummy":
        fill_random(weights, config.seed)
    else:
        places = destinations(model_config, weights)
        infos = checkpoint.tensor_infos()
        check_names(model_config, places, {name: (info.shape, info.dtype) for name, info in infos.items()})
        fill(places, checkpoint.tensors())
    return Decoder(model_config, weights, max_model_len=max_model_len, compile_layers=config.compiles)


def _make_pool(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> memory.KVPool:
    if device.type == "cuda":
        return memory.reserved_pool(model_config, config.block_size, dtype, device, config.num_gpu_blocks_override)
    num_blocks = config.num_gpu_blocks_override or memory.cpu_num_blocks(
        model_config, config.block_size, dtype, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len
    )
    return memory.cpu_pool(model_config, config.block_size, dtype, num_blocks)


def _warm_up(runner: Runner, device: torch.device) -> int:
    """Bytes that the largest eager step takes for a moment. The CPU has nothing to warm up."""
    if device.type == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.warm_up()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def _eos_token_ids(checkpoint: Checkpoint, from_tokenizer: frozenset[int]) -> frozenset[int]:
    found = set(from_tokenizer)
    for source in (checkpoint.config, checkpoint.generation_config):
        value = source.get("eos_token_id")
        found |= set(value) if isinstance(value, list) else {value} if isinstance(value, int) else set()
    return frozenset(found)


def _report(built: Built) -> None:
    config, mode = built.config, built.config.resolved_mode
    if built.uniform_sizes and built.uniform_sizes[-1] < config.max_num_seqs:
        logger.warning(
            "the largest recorded decode batch is %d, max_num_seqs is %d: batches of %d to %d requests run without it; "
            "leave cudagraph_capture_sizes out to record up to the limit",
            built.uniform_sizes[-1],
            config.max_num_seqs,
            built.uniform_sizes[-1] + 1,
            config.max_num_seqs,
        )
    store = built.engine.runner.store
    if mode is not CUDAGraphMode.NONE:
        ladder = built.uniform_sizes or built.mixed_sizes
        live, padded = worst_padding(ladder)
        logger.info(
            "%s on %s: %d recordings, ladder %s, worst padding %d -> %d, %d KV blocks of %d tokens; start-up %s",
            mode.value,
            built.engine.runner.backend.name,
            store.num_recordings,
            list(ladder),
            live,
            padded,
            built.pool.num_blocks,
            config.block_size,
            ", ".join(f"{name} {seconds:.2f} s" for name, seconds in built.seconds.items()),
        )


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now
