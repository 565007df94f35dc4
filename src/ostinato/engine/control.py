"""What changes a running engine between two steps: sleep, other weights, other recordings. Requests stay.

Everything here settles the engine first, so that nothing is in flight, and leaves it as it was where it fails, or says
in what state it is. After a failure of the engine itself everything raises EngineDeadError.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ostinato.config import AUTO, EngineConfig
from ostinato.connectors.protocol import ContentsKVConnectorScheduler
from ostinato.engine.build import Built, Progress, recording_progress
from ostinato.engine.parts import (
    connect,
    contents_name,
    load_scales,
    load_weights,
    make_pool,
    make_runner,
    updated_contents_name,
    warm_up,
)
from ostinato.engine.resolve import resolve_flash, resolve_kv_format, resolve_ladders
from ostinato.engine.stats import RecordingStat, recording_stats
from ostinato.errors import CapacityError, ConfigError, UnavailableError, WeightError
from ostinato.graphs.dispatch import Dispatcher
from ostinato.graphs.tuning import tune
from ostinato.models.kv_scales import fill_scales, is_scale
from ostinato.models.weights import destinations, is_ignorable
from ostinato.runner.memory import KVPool
from ostinato.runner.runner import Runner
from ostinato.weights.base import Checkpoint
from ostinato.weights.checkpoint import open_checkpoint

logger = logging.getLogger("ostinato")

WEIGHTS, KV_CACHE = "weights", "kv_cache"

RECONFIGURABLE = (
    "cudagraph_capture_sizes",
    "cudagraph_mode",
    "kv_cache_dtype",
    "max_num_batched_tokens",
    "max_num_seqs",
)


# -- sleep -------------------------------------------------------------------------------------------------------------


def sleep(built: Built, level: int) -> None:
    """Gives the memory of weights and KV back. Running requests wait and will be computed again; recordings stay.

    Level 1 keeps the weights in host memory (on the CPU that saves the KV cache alone), level 2 reads them from the
    checkpoint when woken. No effect on what is away already. Raises ConfigError for another level.
    """
    if level not in (1, 2):
        raise ConfigError(f"level={level}: 1 keeps the weights in host memory, 2 does not", field="level")
    engine = built.engine
    engine.require_alive()
    engine.settle()
    engine.scheduler.preempt_all()
    engine.runner.backend.synchronize()
    if KV_CACHE not in engine.missing:
        engine.set_missing(KV_CACHE, "the engine sleeps: wake_up() first")
        built.pool.give_back()
    if WEIGHTS not in engine.missing:
        engine.set_missing(WEIGHTS, "the engine sleeps: wake_up() first")
        built.weights.give_back(keep=level == 1)
    if built.device.type == "cuda":
        torch.cuda.empty_cache()


def wake_up(built: Built, tags: Sequence[str] | None) -> None:
    """Takes back what `tags` name, "weights" or "kv_cache"; None is both. No effect on what is there already.

    Raises CapacityError where the device has no room any more: the engine goes on sleeping, and it can be tried again.
    """
    for tag in tags or ():
        if tag not in (WEIGHTS, KV_CACHE):
            raise ConfigError(f"tag {tag!r}: must be {WEIGHTS!r} or {KV_CACHE!r}", field="tags")
    engine = built.engine
    engine.require_alive()
    wanted = [tag for tag in (WEIGHTS, KV_CACHE) if tag in engine.missing and (tags is None or tag in tags)]
    if WEIGHTS in wanted and not built.weights.is_mapped:
        if not built.weights.take_back():
            engine.set_missing(WEIGHTS, "they have not been read again: reload_weights() or update_weights() first")
            reload_weights(built)
        engine.set_there(WEIGHTS)
    if KV_CACHE in wanted:
        built.pool.take_back()
        engine.set_there(KV_CACHE)


# -- weights -----------------------------------------------------------------------------------------------------------


def update_weights(built: Built, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Overwrites parameters in place, by their names in the checkpoint; returns how many.

    Scales of the KV cache may be among them, all or none. Recordings stay, because addresses do. Running requests are
    computed again from their tokens, and no cached prefix is used any more. Raises WeightError for an unknown name or
    another shape: where others were written before it, the engine then refuses to run until all parameters were
    written. Raises StaleGraphError, by name, if a parameter was replaced by another tensor instead of being written to.
    """
    _require_writable(built)
    engine, places = built.engine, destinations(built.model_config, built.weights.weights)
    engine.settle()
    scales, new_scales = built.pool.storage.scales, list[tuple[str, torch.Tensor]]()
    written: set[str] = set()
    try:
        with torch.no_grad():
            for name, tensor in tensors:
                if is_scale(name) and scales is not None:
                    new_scales.append((name, tensor.cpu()))
                if is_ignorable(name, built.model_config):
                    continue
                _place(places, name, tensor).copy_(tensor)
                written.add(name)
            if scales is not None and fill_scales(new_scales, scales.values):
                scales.pending = False
    except BaseException:
        if written and written != places.keys():
            engine.set_missing(
                WEIGHTS,
                f"an update failed after {len(written)} of {len(places)} tensors: write them all, or reload_weights()",
            )
        raise
    finally:
        if written or new_scales:
            engine.scheduler.preempt_all(weights_changed=True)
            _name_contents(built, None)
    if written == places.keys():
        engine.set_there(WEIGHTS)
    engine.runner.verify_statics()
    return len(written) + len(new_scales)


def reload_weights(built: Built) -> None:
    """All parameters from the checkpoint, as at the start. Otherwise as `update_weights`."""
    _require_writable(built)
    built.engine.settle()
    checkpoint = open_checkpoint(built.config.model, built.config.load_format)
    built.engine.scheduler.preempt_all(weights_changed=True)
    read: Checkpoint | None = None
    try:
        load_weights(built.config, checkpoint, built.model_config, built.weights.weights)
        if (scales := built.pool.storage.scales) is not None:
            load_scales(built.config, checkpoint, scales)
        read = checkpoint
    finally:
        _name_contents(built, read)
    built.engine.set_there(WEIGHTS)
    built.engine.runner.verify_statics()


def _name_contents(built: Built, checkpoint: Checkpoint | None) -> None:
    """Tells the connector what KV is of from now on; of no checkpoint: None."""
    connector = None if built.connector is None else built.connector.scheduler
    if not isinstance(connector, ContentsKVConnectorScheduler):
        return
    config, storage = built.config, built.pool.storage
    if checkpoint is None:
        connector.set_contents(updated_contents_name(config, built.weights.weights, storage))
    else:
        connector.set_contents(contents_name(config, checkpoint, storage))


def _require_writable(built: Built) -> None:
    built.engine.require_alive()
    if not built.weights.is_mapped:
        raise UnavailableError('the weights are away: wake_up(["weights"]) first')


def _place(places: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> torch.Tensor:
    place = places.get(name)
    if place is None:
        raise WeightError(f"{name!r} is no tensor of this model")
    if tensor.shape != place.shape:
        raise WeightError(f"{name} has the shape {list(tensor.shape)}, this model's is {list(place.shape)}")
    return place


# -- recordings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """What a change of recordings did. `recorded` are the new ones; `kept` and `dropped` count the old.
    `capture_sizes`, in requests, and `mixed_capture_sizes`, in tokens, are the ladders from now on."""

    recorded: tuple[RecordingStat, ...]
    kept: int
    dropped: int
    num_blocks: int
    preempted: int
    seconds: float
    capture_sizes: tuple[int, ...]
    mixed_capture_sizes: tuple[int, ...]

    @property
    def recording_bytes(self) -> int:
        return sum(line.num_bytes for line in self.recorded)


def reconfigure(built: Built, options: dict[str, Any], progress: Progress | None = None) -> Reconfiguration:
    """Records again what `options` change (RECONFIGURABLE) and goes on with the running requests, whose KV stays.

    Only the worst of them are computed again, where fewer rows or fewer KV blocks are left; all, where the KV cache
    gets another format. `cudagraph_capture_sizes="auto"` takes the sizes from the steps that this engine has counted so
    far, at most as many as the default ladders have (`graphs.tuning.tune`). Raises ConfigError for
    options that cannot be changed or do not fit, CaptureError or CapacityError where recording fails; all is then as it
    was before.
    """
    unknown = sorted(set(options) - set(RECONFIGURABLE))
    if unknown:
        raise ConfigError(f"{', '.join(unknown)} cannot be changed at run time: only {', '.join(RECONFIGURABLE)} can")
    engine, began = built.engine, time.perf_counter()
    engine.require_alive()
    if engine.missing:
        raise UnavailableError("the engine sleeps: wake_up() first")
    config = _changed(built, options)
    uniform, mixed = resolve_ladders(config)
    dispatcher = Dispatcher(config.resolved_mode, uniform, mixed, config.max_num_seqs)
    engine.settle()
    engine.runner.backend.synchronize()
    preempted = engine.scheduler.preemptions
    before = set(engine.runner.store.available())
    try:
        if _same_sizes(config, built.config) and _same_format(config, built):
            dropped = engine.runner.change_dispatcher(
                dispatcher, recording_progress(progress), lambda: _num_blocks(built, engine.runner)
            )
            _resize_pool(built, _num_blocks(built, engine.runner))
        else:
            dropped, before = len(before), set()
            _change_sizes(built, config, dispatcher, progress)
    except torch.OutOfMemoryError as error:
        raise CapacityError(f"the device has no room for other recordings beside the present ones: {error}") from error
    built.config, built.uniform_sizes, built.mixed_sizes = config, uniform, mixed
    lines = recording_stats(engine.runner.store.table())
    new = tuple(line for line, index in zip(lines, engine.runner.store.available(), strict=True) if index not in before)
    done = Reconfiguration(
        recorded=new,
        kept=len(lines) - len(new),
        dropped=dropped,
        num_blocks=built.pool.num_blocks,
        preempted=engine.scheduler.preemptions - preempted,
        seconds=time.perf_counter() - began,
        capture_sizes=uniform,
        mixed_capture_sizes=mixed,
    )
    logger.info(
        "reconfigured in %.2f s: %d recorded (%d MiB), %d kept, %d dropped, %d KV blocks, %d requests preempted",
        done.seconds,
        len(done.recorded),
        done.recording_bytes >> 20,
        done.kept,
        done.dropped,
        done.num_blocks,
        done.preempted,
    )
    return done


def _changed(built: Built, options: dict[str, Any]) -> EngineConfig:
    """The present options with these. "auto" becomes the sizes that it stands for now, so that no later change of
    other options moves them."""
    if options.get("cudagraph_capture_sizes") != AUTO:
        return replace(built.config, **options)
    config = replace(built.config, **options | {"cudagraph_capture_sizes": None})
    counts = built.engine.runner.counters.live_sizes()
    tuned = tune(counts, config.resolved_mode, config.max_num_seqs, config.max_num_batched_tokens)
    return replace(config, cudagraph_capture_sizes=tuned.sizes)


def _same_sizes(one: EngineConfig, other: EngineConfig) -> bool:
    """Whether state and buffers may stay."""
    return (one.max_num_seqs, one.max_num_batched_tokens) == (other.max_num_seqs, other.max_num_batched_tokens)


def _same_format(config: EngineConfig, built: Built) -> bool:
    """Whether the KV pool may stay."""
    return resolve_kv_format(config.kv_cache_dtype, built.dtype, built.device).name == built.pool.storage.name


def _change_sizes(built: Built, config: EngineConfig, dispatcher: Dispatcher, progress: Progress | None) -> None:
    """State and buffers of other sizes, or another KV pool, so everything is recorded again; the old ones stay until
    all has succeeded."""
    engine, old, old_pool = built.engine, built.engine.runner, built.pool
    worker = None if built.connector is None else built.connector.worker
    pool = old_pool if _same_format(config, built) else _other_pool(built, config)
    try:
        form = resolve_kv_format(config.kv_cache_dtype, built.dtype, built.device)
        flash = resolve_flash(config, built.model_config, form, built.dtype, built.device)
        new = make_runner(config, old.model, pool, dispatcher, built.max_model_len, worker, flash=flash)
    except BaseException:
        if pool is not old_pool:
            pool.close()
        raise
    try:
        warm = warm_up(new)
        new.record(recording_progress(progress))
        budget = built.budget
        num_blocks = pool.num_blocks
        if budget is not None:
            budget = replace(budget, activation_bytes=warm.activation_bytes, gather_bytes=new.buffers.gather_bytes)
            goes = old.num_bytes() + (0 if pool is old_pool else old_pool.mapped_bytes)
            num_blocks = budget.num_blocks_for(pool, new.pending_bytes() - goes)
        if pool is not old_pool:
            _exchange_memory(built, pool, num_blocks if budget is None else min(num_blocks, budget.min_blocks))
    except BaseException:
        new.close()
        if pool is not old_pool:
            pool.close()
        raise
    connect(config, new, engine.scheduler)
    new.take_over(old)
    engine.replace_runner(new)
    engine.scheduler.resize_rows(config.max_num_seqs, config.max_num_batched_tokens)
    old.close()
    if pool is not old_pool:
        old_pool.close()
        built.pool = pool
        engine.scheduler.resize_pool(pool.num_blocks)
    built.budget = budget
    libraries = built.measured.library_bytes + warm.library_bytes
    built.measured = replace(built.measured, library_bytes=libraries, activation_bytes=warm.activation_bytes)
    _resize_pool(built, num_blocks)


def _other_pool(built: Built, config: EngineConfig) -> KVPool:
    """For another format, with memory behind the scratch block alone on CUDA. Raises ConfigError, WeightError."""
    if built.connector is not None:
        raise ConfigError(
            "kv_cache_dtype cannot be changed under a connector, which holds blocks of the present format"
        )
    checkpoint = open_checkpoint(config.model, config.load_format)
    form = resolve_kv_format(config.kv_cache_dtype, built.dtype, built.device)
    return make_pool(config, checkpoint, built.model_config, form, built.device, built.max_model_len)


def _exchange_memory(built: Built, pool: KVPool, num_blocks: int) -> None:
    """Takes the present pool's memory away, and its contents, for `num_blocks` of another. Raises CapacityError where
    the device has no room for these: the present pool then has its memory again, or the engine sleeps without it."""
    engine = built.engine
    engine.scheduler.preempt_all()
    built.pool.give_back()
    try:
        pool.resize(num_blocks)
    except BaseException:
        engine.set_missing(KV_CACHE, "its memory was given to others meanwhile: wake_up() to try again")
        pool.give_back()
        built.pool.take_back()
        engine.set_there(KV_CACHE)
        raise


def _num_blocks(built: Built, runner: Runner) -> int:
    """KV blocks that fit beside what is there now. Raises CapacityError for too few."""
    if built.budget is None:
        return built.pool.num_blocks
    return built.budget.num_blocks_for(built.pool, runner.pending_bytes())


def _resize_pool(built: Built, num_blocks: int) -> None:
    """Fewer blocks are taken from their requests first; more are handed out once they have memory."""
    pool, scheduler = built.pool, built.engine.scheduler
    if num_blocks < pool.num_blocks:
        scheduler.resize_pool(num_blocks)
        pool.resize(num_blocks)
    elif num_blocks > pool.num_blocks:
        pool.resize(num_blocks)
        scheduler.resize_pool(num_blocks)
