"""A name for a model's contents, for what outlives the process: KV on disk, or in another process."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import torch

from ostinato.weights.base import Checkpoint

_SAMPLES = 512
_CHUNK = 1 << 20  # values; 64-bit products of so many take 8 MiB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(checkpoint: Checkpoint) -> str:
    """Equal for equal checkpoints, wherever they lie: config, tensor names and shapes, and values taken at even
    distances from every tensor. 32 hex digits. Reads a few pages of each tensor."""
    seen = blake2b(json.dumps(dict(checkpoint.config), sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted(checkpoint.tensors(), key=lambda pair: pair[0]):
        flat = tensor.reshape(-1)
        places = torch.linspace(0, max(flat.numel() - 1, 0), min(_SAMPLES, flat.numel()), dtype=torch.float64).long()
        seen.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        seen.update(flat[places].contiguous().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


def full_fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Equal for equal tensors under equal names, by every bit of them. 32 hex digits, the same on every device.

    Tensors stay where they are: of every 2^20 values there is a sum of products with fixed odd 64-bit numbers, modulo
    2^64 (multilinear hashing: Carter and Wegman, 1979), and BLAKE2b over these sums. A change of one value changes the
    sum; one of several leaves it with a probability of 2^-49 at most, for values of 16 bits. Not against an adversary.
    """
    seen = blake2b(digest_size=16)
    numbers = np.random.PCG64(0).random_raw(_CHUNK) | np.uint64(1)  # a stream that NumPy promises to keep
    factors: dict[torch.device, torch.Tensor] = {}
    for name, tensor in tensors:
        device = tensor.device
        if device not in factors:
            factors[device] = torch.from_numpy(numbers.view(np.int64)).to(device)
        seen.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        values = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
        sums = [(chunk * factors[device][: len(chunk)]).sum() for chunk in values.split(_CHUNK)]
        if sums:
            seen.update(torch.stack(sums).cpu().numpy().tobytes())
    return seen.hexdigest()
