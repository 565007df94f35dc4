"""The parts of an engine, each made from the options and the parts below it. A running engine makes some again."""

from __future__ import annotations

from hashlib import blake2b

import torch

from ostinato.config import EngineConfig
from ostinato.connectors.protocol import KVConnector, KVConnectorWorker
from ostinato.connectors.registry import make_connector
from ostinato.engine.resolve import num_in_flight, resolve_gather
from ostinato.errors import ConfigError
from ostinato.graphs.backends import GraphBackend
from ostinato.graphs.dispatch import Dispatcher
from ostinato.graphs.pending import Capture
from ostinato.kernels.kv_formats import KVFormat
from ostinato.kv.storage import KVScales, KVStorage
from ostinato.models.config import ModelConfig
from ostinato.models.decoder import Decoder
from ostinato.models.kv_scales import fill_scales, is_scale
from ostinato.models.ranges import LayerRanges
from ostinato.models.weights import DecoderWeights, check_names, destinations, fill, fill_random
from ostinato.runner import memory
from ostinato.runner.checker import StepChecker
from ostinato.runner.inputs import StepBuffers, TileShape
from ostinato.runner.layout import ArenaLayout
from ostinato.runner.runner import Runner
from ostinato.runner.state import RequestState
from ostinato.scheduler import Scheduler
from ostinato.weights.base import Checkpoint
from ostinato.weights.fingerprint import fingerprint, full_fingerprint


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


def make_ranges(config: EngineConfig, device: torch.device) -> LayerRanges | None:
    """None unless asked for. Raises ConfigError where there is nothing that NVTX could name."""
    if not config.enable_layerwise_nvtx_tracing:
        return None
    if device.type != "cuda":
        raise ConfigError(
            f"enable_layerwise_nvtx_tracing names CUDA work for Nsight, and this would run on {device}: leave it out"
        )
    return LayerRanges(torch.cuda.nvtx)


def load_scales(config: EngineConfig, checkpoint: Checkpoint, scales: KVScales) -> bool:
    """Sets the scales of the KV cache from the checkpoint; False, and they stay, where it has none. Raises
    WeightError."""
    if config.load_format == "dummy" or not any(map(is_scale, checkpoint.tensor_infos())):
        return False
    scales.pending = not fill_scales(checkpoint.tensors(), scales.values)
    return True


def make_pool(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model_config: ModelConfig,
    form: KVFormat,
    device: torch.device,
    max_model_len: int,
) -> memory.KVPool:
    """A pool with its scales. Raises WeightError for those of the checkpoint."""
    pool = _allocate_pool(config, model_config, form, device, max_model_len)
    if (scales := pool.storage.scales) is not None:
        try:
            scales.pending = not load_scales(config, checkpoint, scales) and config.calculate_kv_scales
        except BaseException:
            pool.close()
            raise
    return pool


def _allocate_pool(
    config: EngineConfig, model_config: ModelConfig, form: KVFormat, device: torch.device, max_model_len: int
) -> memory.KVPool:
    """On CUDA, addresses for all that the device could hold and memory behind the scratch block alone; on the CPU all
    of it, which the system commits as it is used."""
    most = config.num_gpu_blocks_override
    if device.type == "cuda":
        size = memory.block_bytes(model_config, config.block_size, form)
        most = most or torch.cuda.mem_get_info(device)[1] // size
        return memory.KVPool(model_config, config.block_size, form, device, most=most)
    most = most or memory.cpu_num_blocks(
        model_config, config.block_size, form, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len
    )
    pool = memory.KVPool(model_config, config.block_size, form, device, most=most)
    pool.resize(most)
    return pool


def make_backend(device: torch.device) -> GraphBackend:
    if device.type == "cuda":
        from ostinato.graphs.cuda import CudaBackend

        return CudaBackend(device)
    from ostinato.graphs.tape import TapeBackend

    return TapeBackend()


def make_kv_connector(config: EngineConfig, checkpoint: Checkpoint, pool: memory.KVPool) -> KVConnector | None:
    if config.kv_transfer_config is None:
        return None
    if not config.enable_prefix_caching:
        raise ConfigError("kv_transfer_config finds KV by the hashes of prefixes: leave enable_prefix_caching on")
    return make_connector(
        config.kv_transfer_config,
        pool.storage,
        block_size=config.block_size,
        model=lambda: contents_name(config, checkpoint, pool.storage),
    )


def contents_name(config: EngineConfig, checkpoint: Checkpoint, storage: KVStorage) -> str:
    """Names what blocks hold: of which model, in which format, under which scales. Where bits matter, KV computed
    without `batch_invariant`, or elsewhere, is another's. Raises ConfigError where scales are not known yet."""
    model = f"dummy {config.seed}" if config.load_format == "dummy" else fingerprint(checkpoint)
    return _contents_name(config, model, storage)


def updated_contents_name(config: EngineConfig, weights: DecoderWeights, storage: KVStorage) -> str:
    """As `contents_name`, for weights that may be no checkpoint's: by every bit of them, since an update may change a
    few values alone. Reads them all, where they are. Raises ConfigError where scales are not known yet."""
    return _contents_name(config, f"updated {full_fingerprint(weights.named())}", storage)


def _contents_name(config: EngineConfig, model: str, storage: KVStorage) -> str:
    if config.batch_invariant:
        model = f"{model} batch_invariant {storage.pool.device.type}"
    scales = storage.scales
    if scales is None:
        return f"{model} {storage.name}"
    if scales.pending:
        raise ConfigError(
            f"kv_cache_dtype={config.kv_cache_dtype!r}: the first prompt would set the scales, and another process "
            "would read this one's blocks with its own: take a checkpoint with k_scale and v_scale, or "
            "calculate_kv_scales=False"
        )
    return f"{model} {storage.name} {blake2b(scales.values.cpu().numpy().tobytes(), digest_size=16).hexdigest()}"


def make_runner(
    config: EngineConfig,
    model: Decoder,
    pool: memory.KVPool,
    dispatcher: Dispatcher,
    max_model_len: int,
    connector: KVConnectorWorker | None,
    *,
    flash: bool,
) -> Runner:
    """State, buffers and an empty store for the sizes in `config`, over a model and a KV pool that stay. `flash`:
    FlashAttention attends for prompts. Raises CapacityError where there is no room for the workspace of
    `cudagraph_cut`."""
    weights, model_config = model.weights.embed, model.config
    gather = resolve_gather(config, max_model_len, pool.storage.pool.dtype)
    if gather is not None:
        size = gather.num_bytes(model_config, config.max_num_seqs)
        memory.require_gather_room(size, config.max_num_seqs, max_model_len, weights.device)
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
            gather=gather,
            tiles=tile_shape(config.block_size, max_model_len, weights.device),
            flash_width=layout.table_width if flash else 0,
        ),
        backend=make_backend(weights.device),
        dispatcher=dispatcher,
        block_size=config.block_size,
        max_in_flight=in_flight,
        capture=Capture(config.capture),
        connector=connector,
    )


def tile_shape(block_size: int, max_model_len: int, device: torch.device) -> TileShape | None:
    """Of the lists that the kernels of a CUDA device read."""
    if device.type != "cuda":
        return None
    return TileShape(max_model_len, block_size, torch.cuda.get_device_properties(device).multi_processor_count)


def connect(config: EngineConfig, runner: Runner, scheduler: Scheduler) -> None:
    """What a runner asks of a scheduler: tables for its history, and where it checks replays, which blocks are free."""
    runner.history.table_of = scheduler.kv.table
    if config.check:
        runner.enable_check(
            StepChecker(
                num_replays=config.check,
                poison=config.poison,
                state=runner.state,
                buffers=runner.buffers,
                storage=runner.storage,
                free_blocks=scheduler.kv.empty_blocks,
            )
        )


def warm_up(runner: Runner) -> memory.Measured:
    """Runs the largest eager step, over padding, where steps run and where they are recorded: libraries keep a
    workspace for each of the two. The CPU has nothing to warm up."""
    device = runner.state.arena.device
    before = memory.device_memory(device, trim=True)
    if before is None:
        return memory.Measured()
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    runner.warm_up()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - allocated
    with runner.backend.warm_up_context():
        runner.warm_up()
    after = memory.device_memory(device, trim=True)
    assert after is not None
    return memory.Measured(None, library_bytes=after.used - before.used, activation_bytes=int(activations))
