"""Launching: early, while the predecessor still runs, and again and again with little work for the host.

Programmatic dependent launch (CUDA, compute capability 9.0 on): a kernel starts before its predecessor has ended.
Launched so, it must wait before it touches what an earlier kernel of its stream wrote, or may still read. One that
waits first of all is always right, and saves the time that starting takes.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["KernelCall", "PreparedCall", "early", "num_multiprocessors", "start", "starts_early"]

_KNOWN_LAUNCHER = "3.6."
"""Versions of Triton whose launcher `PreparedCall` knows; it is not part of Triton's interface."""


@triton.jit
def start(PDL: tl.constexpr):
    """Lets the successor start and waits for the predecessor: the beginning of a kernel with nothing to do before."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels may be launched programmatically there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def early(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a kernel's launch that ask for it."""
    return {"PDL": starts_early(device), "launch_pdl": starts_early(device)}


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """In Triton's interpreter tensors are on the CPU: two, so that programs walk over several blocks there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A launch, not made yet: `kernel[grid](*args, **options)`."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]  # compile-time arguments, and how to launch

    def __call__(self) -> None:
        self.kernel[self.grid](*self.args, **self.options)

    @property
    def can_be_prepared(self) -> bool:
        return triton.__version__.startswith(_KNOWN_LAUNCHER) and isinstance(self.kernel, triton.JITFunction)


class PreparedCall:
    """A launch to be repeated, of which only the grid and integers may change: which kernel the arguments need is found
    once, and pointers are numbers from then on, so that a launch takes the host some 5 us instead of some 30. The
    tensors live as long as this. Integers that change must be exempt from specialisation in the kernel."""

    def __init__(self, call: KernelCall) -> None:
        kernel = call.kernel
        compiled = kernel.warmup(*call.args, grid=call.grid, **call.options)
        named = [call.options[name] for name in kernel.arg_names[len(call.args) :]]
        self._tensors = tuple(arg for arg in call.args if isinstance(arg, torch.Tensor))
        args = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in (*call.args, *named)]
        self._run = compiled.run  # loads it, so that `function` and what is packed are there
        # metadata of the kernel and of the launch, and what a profiler may hook in before and after it
        self._args = [compiled.packed_metadata, None, None, None, *args]
        self._function = compiled.function
        self._at = {name: index + 4 for index, name in enumerate(kernel.arg_names)}
        self.grid = (*call.grid, 1, 1)[:3]

    def place(self, name: str) -> int:
        """Where the integer `name` stands, for `get` and `put`."""
        return self._at[name]

    def get(self, place: int) -> int:
        return int(self._args[place])

    def put(self, place: int, value: int) -> None:
        self._args[place] = value

    def launch(self, stream: int, x: int, y: int, z: int) -> None:
        """`stream`: the raw handle. Grid (x, y, z)."""
        self._run(x, y, z, stream, self._function, *self._args)
