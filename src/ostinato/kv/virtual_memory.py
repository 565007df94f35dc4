"""A range of device addresses whose memory comes and goes underneath (CUDA virtual memory management).

Recordings hold addresses. Reserving the KV pool's addresses for the largest possible pool, and mapping memory behind
them only once everything else has been measured, sizes the pool exactly; nothing that was recorded moves.
Driver calls: `cuMemAddressReserve`, `cuMemCreate`, `cuMemMap`, `cuMemSetAccess`, through `cuda-bindings`.
"""

from __future__ import annotations

from typing import Any

import torch

from ostinato.errors import CapacityError


class DeviceRange:
    """`num_bytes` of reserved addresses on one device, mapped from the front. Not thread-safe."""

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

    @property
    def mapped_bytes(self) -> int:
        return sum(size for _, size, _ in self._parts)

    def map_up_to(self, num_bytes: int) -> None:
        """Maps whole pages so that at least the first `num_bytes` bytes can be used. Their contents are undefined."""
        offset, size = self.mapped_bytes, self._round_up(num_bytes) - self.mapped_bytes
        if size <= 0:
            return
        if offset + size > self.num_bytes:
            raise CapacityError(f"{num_bytes} bytes do not fit the reserved range of {self.num_bytes}")
        driver, address = self._driver, self._driver.CUdeviceptr(self._base + offset)
        handle = self._call("cuMemCreate", size, self._properties, 0)
        self._call("cuMemMap", address, size, 0, handle, 0)
        access = driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, size, [access], 1)
        self._parts.append((offset, size, handle))

    def unmap(self) -> None:
        """Gives all memory back to the device; the addresses stay reserved."""
        torch.cuda.synchronize(self._device)
        while self._parts:
            offset, size, handle = self._parts.pop()
            self._call("cuMemUnmap", self._driver.CUdeviceptr(self._base + offset), size)
            self._call("cuMemRelease", handle)

    def close(self) -> None:
        """Unmaps and releases the addresses: no tensor over them may be used any more. Safe to call twice."""
        self.unmap()
        if self._base:
            self._call("cuMemAddressFree", self._driver.CUdeviceptr(self._base), self.num_bytes)
            self._base = 0

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole range as a flat tensor, mapped or not: reading an unmapped part is a device fault."""
        count = self.num_bytes // 2
        view = torch.as_tensor(_CudaArray(self._base, count), device=self._device)
        return view.view(dtype)

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
