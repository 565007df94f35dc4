"""The only place that wires: from an EngineConfig to a running Engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from ostinato.config import EngineConfig
from ostinato.connectors.protocol import KVConnector, KVConnectorWorker
from ostinato.connectors.registry import make_connector
from ostinato.engine.engine import Engine
from ostinato.engine.stats import MemoryStat
from ostinato.errors import ConfigError
from ostinato.graphs.backends import GraphBackend
from ostinato.graphs.buckets import mixed_ladder, uniform_ladder, worst_padding
from ostinato.graphs.dispatch import Dispatcher
from ostinato.graphs.mode import CUDAGraphMode, RuntimeMode
from ostinato.graphs.pending import Capture
from ostinato.models.config import ModelConfig, parse_config
from ostinato.models.decoder import Decoder
from ostinato.models.weights import DecoderWeights, check_names, destinations, fill, fill_random
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
from ostinato.weights.fingerprint import fingerprint

logger = logging.getLogger("ostinato")

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, how much is done, how much there is)."""


@dataclass(slots=True)
class Built:
    """An engine, what it is made of, and what was decided on the way. `seconds` per start-up part."""

    engine: Engine
    config: EngineConfig
    model_config: ModelConfig
    weights: memory.WeightMemory
    pool: memory.KVPool
    connector: KVConnector | None
    budget: memory.Budget | None  # None on the CPU, which is not the engine's alone
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    uniform_sizes: tuple[int, ...]
    mixed_sizes: tuple[int, ...]
    measured: memory.Measured
    seconds: dict[str, float] = field(default_factory=dict)

    def memory(self) -> MemoryStat:
        runner, now = self.engine.runner, memory.device_memory(self.device, trim=False)
        return MemoryStat(
            before=self.measured.before_bytes,
            weights=self.weights.mapped_bytes,
            kv=self.pool.mapped_bytes,
            graphs=runner.store.bytes,
            buffers=runner.state.num_bytes() + runner.buffers.num_bytes(),
            libraries=self.measured.library_bytes,
            activations=self.measured.activation_bytes,
            free=None if now is None else now.free,
            total=None if now is None else now.total,
        )

    def close(self) -> None:
        """Destroys the recordings as one set, then frees the memory. Nothing may be in flight."""
        self.engine.runner.close()
        if self.connector is not None:
            self.connector.close()
        self.pool.close()
        self.weights.close()


def build(config: EngineConfig, progress: Progress | None = None) -> Built:
    """Raises ConfigError, WeightError or CapacityError before anything is recorded; nothing is then left allocated."""
    with ExitStack() as undo:
        built = _build(config, progress, undo)
        undo.pop_all()
    _report(built)
    return built


def _build(config: EngineConfig, progress: Progress | None, undo: ExitStack) -> Built:
    clock = _Clock()
    device = resolve_device(config.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton launches on the current device, whatever its arguments are on
    checkpoint = open_checkpoint(config.model, config.load_format)
    model_config = parse_config(checkpoint.config)
    dtype = resolve_dtype(config.dtype, model_config, device)
    max_model_len = resolve_max_model_len(config, model_config)
    uniform, mixed = resolve_ladders(config)
    before = memory.device_memory(device, trim=True)
    clock.lap("config")

    weights = memory.WeightMemory(model_config, dtype, device)
    undo.callback(weights.close)
    load_weights(config, checkpoint, model_config, weights.weights)
    model = Decoder(
        model_config,
        weights.weights,
        max_model_len=max_model_len,
        compile_layers=config.compiles,
        batch_invariant=config.batch_invariant,
    )
    clock.lap("weights")
    tokenizer = checkpoint.tokenizer()
    clock.lap("tokenizer")

    pool = _make_pool(config, model_config, dtype, device, max_model_len)
    undo.callback(pool.close)
    connector = _make_connector(config, checkpoint, pool)
    if connector is not None:
        undo.callback(connector.close)
    dispatcher = Dispatcher(config.resolved_mode, uniform, mixed, config.max_num_seqs)
    worker = None if connector is None else connector.worker
    runner = make_runner(config, model, pool, dispatcher, max_model_len, worker)
    undo.callback(runner.close)
    clock.lap("buffers")
    warm = warm_up(runner)
    clock.lap("warm-up")
    budget = None
    if device.type == "cuda":
        budget = memory.Budget(
            device=device,
            utilization=config.gpu_memory_utilization,
            activation_bytes=warm.activation_bytes,
            num_blocks=config.num_gpu_blocks_override,
            min_blocks=1 + -(-max_model_len // config.block_size),
        )
        budget.num_blocks_for(pool)  # what does not fit without graphs is refused before recording
    runner.record(recording_progress(progress))
    clock.lap("recording")
    if budget is not None:
        pool.resize(budget.num_blocks_for(pool, runner.pending_bytes()))
    clock.lap("kv")

    scheduler = Scheduler(
        num_blocks=pool.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        connector=None if connector is None else connector.scheduler,
    )
    enable_check(config, runner, scheduler)
    if config.check and config.poison:
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
        max_in_flight=num_in_flight(config, device),
        connector=connector,
        seed=config.seed,
    )
    clock.lap("scheduler")
    return Built(
        engine=engine,
        config=config,
        model_config=model_config,
        weights=weights,
        pool=pool,
        connector=connector,
        budget=budget,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        uniform_sizes=uniform,
        mixed_sizes=mixed,
        measured=replace(warm, before_bytes=None if before is None else before.used),
        seconds=clock.seconds,
    )


# -- parts that a running engine makes again ---------------------------------------------------------------------------


def make_runner(
    config: EngineConfig,
    model: Decoder,
    pool: memory.KVPool,
    dispatcher: Dispatcher,
    max_model_len: int,
    connector: KVConnectorWorker | None,
) -> Runner:
    """State, buffers and an empty store for the sizes in `config`, over a model and a KV pool that stay."""
    weights, model_config = model.weights.embed, model.config
    in_flight = num_in_flight(config, weights.device)
    layout = ArenaLayout(
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        table_width=-(-max_model_len // config.block_size),
        vocab_size=model_config.vocab_size,
    )
    return Runner(
        model=model,
        storage=pool.storage,
        state=RequestState(layout, model_config.vocab_size, weights.device),
        buffers=StepBuffers(
            model_config,
            max_rows=config.max_num_seqs,
            max_tokens=config.max_num_batched_tokens,
            ring_depth=in_flight + 1,
            dtype=weights.dtype,
            device=weights.device,
        ),
        backend=make_backend(weights.device),
        dispatcher=dispatcher,
        block_size=config.block_size,
        max_in_flight=in_flight,
        capture=Capture(config.capture),
        connector=connector,
    )


def enable_check(config: EngineConfig, runner: Runner, scheduler: Scheduler) -> None:
    runner.history.table_of = lambda request_id: scheduler.kv.table(request_id)
    if config.check:
        runner.enable_check(
            StepChecker(
                num_replays=config.check,
                poison=config.poison,
                state=runner.state,
                buffers=runner.buffers,
                storage=runner.storage,
                block_size=config.block_size,
                free_blocks=scheduler.kv.empty_blocks,
            )
        )


def warm_up(runner: Runner) -> memory.Measured:
    """Runs the largest eager step once, over padding. The CPU has nothing to warm up."""
    device = runner.state.arena.device
    before = memory.device_memory(device, trim=True)
    if before is None:
        return memory.Measured()
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    runner.warm_up()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - allocated
    after = memory.device_memory(device, trim=True)
    assert after is not None
    return memory.Measured(None, library_bytes=after.used - before.used, activation_bytes=int(activations))


def load_weights(
    config: EngineConfig, checkpoint: Checkpoint, model_config: ModelConfig, weights: DecoderWeights
) -> None:
    """Fills all parameters. Raises WeightError, before any is written, for a checkpoint that does not fit."""
    if config.load_format == "dummy":
        fill_random(weights, config.seed)
        return
    places = destinations(model_config, weights)
    infos = checkpoint.tensor_infos()
    check_names(model_config, places, {name: (info.shape, info.dtype) for name, info in infos.items()})
    fill(places, checkpoint.tensors())


def recording_progress(progress: Progress | None) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress("recording", done, total)


def num_in_flight(config: EngineConfig, device: torch.device) -> int:
    return config.max_in_flight or (2 if device.type == "cuda" else 1)


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


def _make_pool(
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> memory.KVPool:
    """On CUDA, addresses for all that the device could hold and memory behind the scratch block alone; on the CPU all
    of it, which the system commits as it is used."""
    most = config.num_gpu_blocks_override
    if device.type == "cuda":
        size = memory.block_bytes(model_config, config.block_size, dtype)
        most = most or torch.cuda.mem_get_info(device)[1] // size
        return memory.KVPool(model_config, config.block_size, dtype, device, most=most)
    most = most or memory.cpu_num_blocks(
        model_config, config.block_size, dtype, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len
    )
    pool = memory.KVPool(model_config, config.block_size, dtype, device, most=most)
    pool.resize(most)
    return pool


def _make_connector(config: EngineConfig, checkpoint: Checkpoint, pool: memory.KVPool) -> KVConnector | None:
    if config.kv_transfer_config is None:
        return None
    if not config.enable_prefix_caching:
        raise ConfigError("kv_transfer_config finds KV by the hashes of prefixes: leave enable_prefix_caching on")
    return make_connector(
        config.kv_transfer_config,
        pool.storage,
        block_size=config.block_size,
        model=lambda: f"dummy {config.seed}" if config.load_format == "dummy" else fingerprint(checkpoint),
    )


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
