"""Ranges of addresses whose memory comes and goes underneath.

Recordings hold addresses. Reserving a range for the largest pool there could be, and putting memory behind it only once
everything else has been measured, sizes the pool exactly; and memory can be given back and taken again while graphs
stay valid. On CUDA by virtual memory management (`cuMemAddressReserve`, `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`,
through `cuda-bindings`); on the CPU by an anonymous mapping whose pages are dropped (`madvise`).
"""

from __future__ import annotations

import mmap
from typing import Any, Protocol

import torch

from ostinato.errors import CapacityError

PART_BYTES = 256 << 20
"""Memory is taken in parts of this size at most, so that a range can shrink by parts."""


class AddressRange(Protocol):
    """`num_bytes` of addresses, with memory behind the first `mapped_bytes`. Not thread-safe."""

    num_bytes: int

    @property
    def mapped_bytes(self) -> int: ...

    def resize(self, num_bytes: int) -> None:
        """Puts memory behind at least the first `num_bytes`, whole pages, and gives back whole parts beyond.

        New memory has undefined contents. Nothing may be running that uses what goes. Raises CapacityError, with what
        could be had still in place, where the range or the device has no room.
        """

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole range as a flat tensor, mapped or not: an unmapped part must not be touched."""

    def close(self) -> None:
        """Gives memory and addresses back: no tensor over them may be used any more. Safe to call twice."""


def reserve(num_bytes: int, device: torch.device) -> AddressRange:
    """Addresses without memory. Raises CapacityError where the device cannot."""
    return DeviceRange(num_bytes, device) if device.type == "cuda" else HostRange(num_bytes)


class HostRange:
    """An anonymous mapping: the system commits a page when it is first written, and dropped pages read as zero."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = max(num_bytes, 1)
        try:
            self._memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(f"{self.num_bytes} bytes of addresses cannot be had: {error}") from error
        self._mapped = 0

    @property
    def mapped_bytes(self) -> int:
        return self._mapped

    def resize(self, num_bytes: int) -> None:
        if num_bytes > self.num_bytes:
            raise CapacityError(f"{num_bytes} bytes do not fit the reserved range of {self.num_bytes}")
        first = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if first < self._mapped:
            self._memory.madvise(mmap.MADV_DONTNEED, first, self._mapped - first)
        self._mapped = num_bytes

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        count = self.num_bytes // dtype.itemsize * dtype.itemsize
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=count).view(dtype)

    def close(self) -> None:
        self.resize(0)  # the addresses go with the last tensor over them


class DeviceRange:
    """Reserved on one CUDA device, mapped from the front."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        self._device = device
        torch.zeros(1, device=device)  # the driver needs torch's context to exist
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device.index or 0
        flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._page = int(self._call("cuMemGetAllocationGranularity", self._properties, flag))
        self.num_bytes = self._round_up(num_bytes)
        self._base = int(self._call("cuMemAddressReserve", self.num_bytes, 0, driver.CUdeviceptr(0), 0))
        self._parts: list[tuple[int, int, Any]] = []  # (offset, size, handle), from the front
        self._view = self._wrap()

    @property
    def mapped_bytes(self) -> int:
        offset, size, _ = self._parts[-1] if self._parts else (0, 0, None)
        return offset + size

    def resize(self, num_bytes: int) -> None:
        if num_bytes > self.num_bytes:
            raise CapacityError(f"{num_bytes} bytes do not fit the reserved range of {self.num_bytes}")
        if self._parts and self._parts[-1][0] >= num_bytes:
            torch.cuda.synchronize(self._device)
        while self._parts and self._parts[-1][0] >= num_bytes:
            offset, size, handle = self._parts.pop()
            self._call("cuMemUnmap", self._driver.CUdeviceptr(self._base + offset), size)
            self._call("cuMemRelease", handle)
        wanted = self._round_up(num_bytes)
        while (offset := self.mapped_bytes) < wanted:
            self._map(offset, min(wanted - offset, self._round_up(PART_BYTES)))

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        return self._view.view(dtype)

    def close(self) -> None:
        self.resize(0)
        if self._base:
            self._call("cuMemAddressFree", self._driver.CUdeviceptr(self._base), self.num_bytes)
            self._base = 0

    def _wrap(self) -> torch.Tensor:
        """The range as [num_bytes / 2] int16. torch asks the driver whose address it is, which an address with no
        memory behind it does not know: there is some meanwhile."""
        try:
            self.resize(1)
            view = torch.as_tensor(_CudaArray(self._base, self.num_bytes // 2), device=self._device)
            self.resize(0)
        except BaseException:
            self.close()
            raise
        return view

    def _map(self, offset: int, size: int) -> None:
        driver, address = self._driver, self._driver.CUdeviceptr(self._base + offset)
        handle = self._call("cuMemCreate", size, self._properties, 0)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
        except CapacityError:
            self._call("cuMemRelease", handle)
            raise
        self._parts.append((offset, size, handle))
        access = driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, size, [access], 1)

    def _call(self, name: str, *args: Any) -> Any:
        status, *values = getattr(self._driver, name)(*args)
        if int(status) != 0:
            free, total = torch.cuda.mem_get_info(self._device)
            raise CapacityError(f"{name} failed with {status.name}: {free >> 20} MiB of {total >> 20} MiB are free")
        return values[0] if values else None

    def _round_up(self, num_bytes: int) -> int:
        return -(-num_bytes // self._page) * self._page


class _CudaArray:
    """What `torch.as_tensor` needs to wrap an address it did not allocate."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<i2",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
