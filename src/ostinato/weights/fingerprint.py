"""A name for a model's contents, for what outlives the process: KV on disk, or in another process."""

from __future__ import annotations

import json
from hashlib import blake2b

import torch

from ostinato.weights.base import Checkpoint

_SAMPLES = 512


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
