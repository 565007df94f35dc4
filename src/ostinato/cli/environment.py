"""What a measurement was made on: versions, processor, device, driver."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

import ostinato

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_CPU_FILE = Path("/proc/cpuinfo")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Plain values, None where unknown."""
    cuda = device.type == "cuda"
    return {
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if cuda else _cpu_name(),
        "device_memory_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else None,
        "num_threads": torch.get_num_threads(),
        "num_cpus": os.cpu_count(),
        "driver": _driver() if cuda else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "ostinato": ostinato.__version__,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build ..."
        words = _DRIVER_FILE.read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    return next((word for word in words if word.replace(".", "").isdigit() and "." in word), None)


def _cpu_name() -> str | None:
    try:
        lines = _CPU_FILE.read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
