"""One memory budget: weights, buffers, graphs and activations are measured, and the KV pool takes what is left.

Weights and the KV pool lie in address ranges of their own, so that both can be given back and had again while the
recordings, which hold their addresses, stay.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from ostinato.errors import CapacityError
from ostinato.kernels.kv_formats import KVFormat
from ostinato.kv.storage import KVScales, KVStorage
from ostinato.models.config import ModelConfig
from ostinato.models.weights import DecoderWeights, allocate
from ostinato.runner.address_range import AddressRange, reserve

CPU_KV_BYTES = 1 << 30
"""The CPU's default KV pool at most; the operating system commits it page by page as blocks are used."""

_MARGIN_BYTES = 64 << 20  # what the driver and the allocator's rounding may still take after sizing
_ALIGNMENT = 256  # of every parameter, in bytes, as torch's allocator would have it


class DeviceMemory(NamedTuple):
    """Bytes of a CUDA device, of all processes."""

    free: int
    total: int

    @property
    def used(self) -> int:
        return self.total - self.free


def device_memory(device: torch.device, *, trim: bool) -> DeviceMemory | None:
    """Now; with `trim`, after all work is done and torch's allocator has given up what it held back for later. None for
    the CPU."""
    if device.type != "cuda":
        return None
    if trim:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    return DeviceMemory(*torch.cuda.mem_get_info(device))


def require_gather_room(num_bytes: int, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
    """Raises CapacityError where the workspace of cudagraph_cut="kv_gather" is larger than what the device has free, or
    the CPU's whole memory."""
    now = device_memory(device, trim=True)
    if now is not None:
        room, what = now.free, "are free"
    else:
        room, what = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "is all there is"
    if num_bytes > room:
        raise CapacityError(
            f"cudagraph_cut='kv_gather' takes a workspace of max_num_seqs x max_model_len = {max_num_seqs} x "
            f"{max_model_len} tokens, {num_bytes >> 20} MiB, and {room >> 20} MiB {what} on {device}: lower one of the "
            "two, or take cudagraph_cut='attention'"
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes seen while an engine was made; zero on the CPU.

    `before_bytes` were in use before, `library_bytes` more after a first step, beyond what it needed for a moment:
    `activation_bytes`.
    """

    before_bytes: int | None = None
    library_bytes: int = 0
    activation_bytes: int = 0


# -- weights -----------------------------------------------------------------------------------------------------------


class WeightMemory:
    """All parameters in one range, whose memory can be given back. `weights` keep their addresses throughout."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Raises CapacityError, with the numbers, where the device has no room."""
        size = 0

        def measure(shape: Sequence[int]) -> torch.Tensor:
            nonlocal size
            size += _aligned(prod(shape) * dtype.itemsize)
            return torch.empty(shape, dtype=dtype, device="meta")

        allocate(config, measure)
        self.num_bytes = size
        self._range: AddressRange = reserve(size, device)
        self._range.resize(size)
        flat, begin = self._range.tensor(torch.uint8), 0

        def carve(shape: Sequence[int]) -> torch.Tensor:
            nonlocal begin
            num_bytes = prod(shape) * dtype.itemsize
            part = flat[begin : begin + num_bytes]
            begin += _aligned(num_bytes)
            return part.view(dtype).view(*shape)

        self.weights: DecoderWeights = allocate(config, carve)
        self._kept: torch.Tensor | None = None  # a copy in host memory while the device's is given back

    @property
    def mapped_bytes(self) -> int:
        return self._range.mapped_bytes

    @property
    def is_mapped(self) -> bool:
        return self.mapped_bytes >= self.num_bytes

    def give_back(self, *, keep: bool) -> None:
        """Lets the device's memory go; with `keep`, after a copy of it to host memory. Nothing may be running."""
        if keep:
            flat = self._range.tensor(torch.uint8)[: self.num_bytes]
            self._kept = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=flat.is_cuda)
            self._kept.copy_(flat)
        self._range.resize(0)

    def take_back(self) -> bool:
        """Has memory again, with what was kept; whether anything was: else the contents are undefined.

        Raises CapacityError where the device has no room any more; it can then be tried again.
        """
        _take_back(self._range, self.num_bytes)
        kept, self._kept = self._kept, None
        if kept is not None:
            self._range.tensor(torch.uint8)[: self.num_bytes].copy_(kept)
        return kept is not None

    def close(self) -> None:
        self._kept = None
        self._range.close()


def _take_back(addresses: AddressRange, num_bytes: int) -> None:
    """All of it or nothing."""
    try:
        addresses.resize(num_bytes)
    except CapacityError:
        addresses.resize(0)
        raise


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


# -- KV ----------------------------------------------------------------------------------------------------------------


def block_bytes(config: ModelConfig, block_size: int, form: KVFormat) -> int:
    return block_size * config.kv_bytes_per_token(form.itemsize)


def pool_shape(config: ModelConfig, num_blocks: int, block_size: int) -> tuple[int, ...]:
    return (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)


class KVPool:
    """Blocks with addresses for `most` of them and memory behind the first `num_blocks`, one of which is scratch. The
    scales, where the format has some, lie outside: they stay when the blocks' memory goes."""

    def __init__(
        self, config: ModelConfig, block_size: int, form: KVFormat, device: torch.device, *, most: int
    ) -> None:
        shape = pool_shape(config, most, block_size)
        scales = None
        if form.largest is not None:
            scales = KVScales(config.num_layers, config.num_kv_heads, form.largest, device)
        self._range = reserve(prod(shape) * form.itemsize, device)
        self.storage = KVStorage(self._range.tensor(form.dtype)[: prod(shape)].view(shape), scales, form.name)
        self.num_blocks = 0
        self.resize(1)

    @property
    def mapped_bytes(self) -> int:
        return self._range.mapped_bytes

    def resize(self, num_blocks: int) -> None:
        """Memory behind the first `num_blocks`; contents of new blocks are undefined. Nothing may be running that uses
        those that go. Raises CapacityError where the device has no room."""
        self._range.resize(num_blocks * self.storage.block_bytes)
        self.num_blocks = num_blocks

    def give_back(self) -> None:
        """Lets all memory go, the scratch block's included; what it held is lost. Nothing may be running."""
        self._range.resize(0)

    def take_back(self) -> None:
        """Has memory again for as many blocks as before. Raises CapacityError where the device has no room any more."""
        _take_back(self._range, self.num_blocks * self.storage.block_bytes)

    def close(self) -> None:
        self._range.close()


def cpu_num_blocks(
    config: ModelConfig, block_size: int, form: KVFormat, *, max_num_seqs: int, max_model_len: int
) -> int:
    """Enough for every row at full length, or 1 GiB, and always for one request of full length."""
    a_row = -(-max_model_len // block_size)
    return 1 + max(a_row, min(a_row * max_num_seqs, CPU_KV_BYTES // block_bytes(config, block_size, form)))


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of a CUDA device the engine may have. `num_blocks`: KV blocks whatever is left, None for what is.

    `activation_bytes`, of the largest eager step, come and go; `min_blocks` hold one request of
    full length, and the scratch block. `gather_bytes`, in use already, are for gathered keys and values.
    """

    device: torch.device
    utilization: float
    activation_bytes: int
    num_blocks: int | None
    min_blocks: int
    gather_bytes: int = 0

    def num_blocks_for(self, pool: KVPool, reserved_bytes: int = 0) -> int:
        """KV blocks that fit beside what the device holds now and `reserved_bytes` to come. Raises CapacityError, with
        the numbers, when one request of full length does not fit."""
        if self.num_blocks is not None:
            return self.num_blocks
        now = device_memory(self.device, trim=True)
        assert now is not None, "a budget is of a CUDA device"
        total, used, size = now.total, now.used - pool.mapped_bytes, pool.storage.block_bytes
        left = int(total * self.utilization) - used - self.activation_bytes - reserved_bytes - _MARGIN_BYTES
        num_blocks = max(left, 0) // size
        if num_blocks < self.min_blocks:
            raise CapacityError(
                f"gpu_memory_utilization={self.utilization} of {total >> 20} MiB leaves {max(left, 0) >> 20} MiB for "
                f"KV after {used >> 20} MiB in use{self._gathered()}, "
                f"{self.activation_bytes >> 20} MiB of activations and {reserved_bytes >> 20} MiB of graphs to come: "
                f"{num_blocks} blocks of {size} bytes, but one request of full length needs {self.min_blocks}. "
                "Raise gpu_memory_utilization or lower max_model_len."
            )
        return min(num_blocks, pool.storage.num_blocks)

    def _gathered(self) -> str:
        if not self.gather_bytes:
            return ""
        return (
            f" ({self.gather_bytes >> 20} MiB of them for cudagraph_cut='kv_gather', which grows with max_num_seqs x "
            "max_model_len)"
        )
