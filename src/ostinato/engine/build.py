"""The only place that wires: from an EngineConfig to a running Engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from ostinato.config import EngineConfig
from ostinato.connectors.protocol import KVConnector
from ostinato.engine.engine import Engine
from ostinato.engine.parts import (
    connect,
    load_weights,
    make_kv_connector,
    make_pool,
    make_ranges,
    make_runner,
    warm_up,
)
from ostinato.engine.resolve import (
    eos_token_ids,
    num_in_flight,
    resolve_device,
    resolve_dtype,
    resolve_flash,
    resolve_kv_format,
    resolve_ladders,
    resolve_max_model_len,
)
from ostinato.engine.stats import MemoryStat
from ostinato.graphs.buckets import worst_padding
from ostinato.graphs.dispatch import Dispatcher
from ostinato.graphs.mode import CUDAGraphMode
from ostinato.models.config import ModelConfig, parse_config
from ostinato.models.decoder import Decoder
from ostinato.runner import memory
from ostinato.sampling.grammar import GrammarCompiler
from ostinato.scheduler import Scheduler
from ostinato.weights.checkpoint import open_checkpoint

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
        """Destroys the recordings as one set, then frees the memory. Nothing may be in flight. Where one part fails,
        the others are closed all the same."""
        with ExitStack() as parts:  # in the reverse of this order
            parts.callback(self.weights.close)
            parts.callback(self.pool.close)
            if self.connector is not None:
                parts.callback(self.connector.close)
            parts.callback(self.engine.runner.close)


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
    form = resolve_kv_format(config.kv_cache_dtype, dtype, device)
    flash = resolve_flash(config, model_config, form, dtype, device)
    max_model_len = resolve_max_model_len(config, model_config)
    uniform, mixed = resolve_ladders(config)
    ranges = make_ranges(config, device)
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
        ranges=ranges,
    )
    clock.lap("weights")
    tokenizer = checkpoint.tokenizer()
    clock.lap("tokenizer")

    pool = make_pool(config, checkpoint, model_config, form, device, max_model_len)
    undo.callback(pool.close)
    connector = make_kv_connector(config, checkpoint, pool)
    if connector is not None:
        undo.callback(connector.close)
    dispatcher = Dispatcher(config.resolved_mode, uniform, mixed, config.max_num_seqs)
    worker = None if connector is None else connector.worker
    runner = make_runner(config, model, pool, dispatcher, max_model_len, worker, flash=flash)
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
            gather_bytes=runner.buffers.gather_bytes,
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
    connect(config, runner, scheduler)
    if config.check and config.poison:
        pool.storage.fill_blocks(range(pool.num_blocks), float("nan"))
    vocab_size = model_config.vocab_size
    eos = eos_token_ids(checkpoint, tokenizer.eos_token_ids if tokenizer else frozenset())
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


def recording_progress(progress: Progress | None) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress("recording", done, total)


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
            "%s on %s, attention of prompts %s: %d recordings, ladder %s, worst padding %d -> %d, "
            "%d KV blocks of %d tokens; start-up %s",
            mode.value,
            built.engine.runner.backend.name,
            built.engine.runner.attention_backend,
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
