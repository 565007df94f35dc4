"""One memory budget: weights, buffers, graphs and activations are measured, and the KV pool takes what is left."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from ostinato.errors import CapacityError
from ostinato.kv.storage import KVStorage
from ostinato.kv.virtual_memory import DeviceRange
from ostinato.models.config import ModelConfig

CPU_KV_BYTES = 1 << 30
"""The CPU's default KV pool at most; the operating system commits it page by page as blocks are used."""

_MARGIN_BYTES = 64 << 20  # what the driver and the allocator's rounding may still take after sizing


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    return block_size * config.kv_bytes_per_token(dtype.itemsize)


def pool_shape(config: ModelConfig, num_blocks: int, block_size: int) -> tuple[int, ...]:
    return (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)


@dataclass(slots=True)
class KVPool:
    """The pool's storage and how many of its blocks have memory behind them. `range` is None for a plain tensor."""

    storage: KVStorage
    num_blocks: int
    range: DeviceRange | None

    def close(self) -> None:
        if self.range is not None:
            self.range.close()
            self.range = None


def cpu_pool(config: ModelConfig, block_size: int, dtype: torch.dtype, num_blocks: int) -> KVPool:
    shape = pool_shape(config, num_blocks, block_size)
    # numpy asks the system for zero pages, which cost nothing until they are used; torch.zeros writes them all
    pool = torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
    return KVPool(KVStorage(pool), num_blocks, None)


def cpu_num_blocks(
    config: ModelConfig, block_size: int, dtype: torch.dtype, *, max_num_seqs: int, max_model_len: int
) -> int:
    """Enough for every row at full length, or 1 GiB, and always for one request of full length."""
    a_row = -(-max_model_len // block_size)
    return 1 + max(a_row, min(a_row * max_num_seqs, CPU_KV_BYTES // block_bytes(config, block_size, dtype)))


def reserved_pool(
    config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device, num_blocks: int | None
) -> KVPool:
    """CUDA: addresses for the largest pool that the device could hold, memory only behind the scratch block."""
    size = block_bytes(config, block_size, dtype)
    total = torch.cuda.mem_get_info(device)[1]
    most = num_blocks if num_blocks is not None else total // size
    reserved = DeviceRange(most * size, device)
    reserved.map_up_to(size)
    flat = reserved.tensor(dtype)
    pool = flat[: most * size // dtype.itemsize].view(pool_shape(config, most, block_size))
    return KVPool(KVStorage(pool), 1, reserved)


def map_rest(
    pool: KVPool, *, utilization: float, transient_bytes: int, num_blocks: int | None, min_blocks: int
) -> None:
    """Maps memory behind as many blocks as the budget leaves. `transient_bytes`: activations of the largest eager
    step, which come and go after this. Raises CapacityError, with the numbers, when one request of full length does
    not fit."""
    assert pool.range is not None
    device, size = pool.storage.pool.device, pool.storage.block_bytes
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - pool.range.mapped_bytes
    left = int(total * utilization) - used - transient_bytes - _MARGIN_BYTES
    wanted = num_blocks if num_blocks is not None else max(left, 0) // size
    if num_blocks is None and wanted < min_blocks:
        raise CapacityError(
            f"gpu_memory_utilization={utilization} of {total >> 20} MiB leaves {max(left, 0) >> 20} MiB for KV after "
            f"{used >> 20} MiB in use and {transient_bytes >> 20} MiB of activations: {wanted} blocks of {size} bytes, "
            f"but one request of full length needs {min_blocks}. Raise gpu_memory_utilization or lower max_model_len."
        )
    pool.range.map_up_to(wanted * size)
    pool.num_blocks = wanted
