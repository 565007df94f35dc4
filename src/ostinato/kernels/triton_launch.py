"""Programmatic dependent launch (CUDA, compute capability 9.0 on): a kernel starts while its predecessor still runs.

Launched so, a kernel must wait before it touches what an earlier kernel of its stream wrote, or may still read. One
that waits first of all is always right, and saves the time that starting takes.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["early", "num_multiprocessors", "start", "starts_early"]


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
