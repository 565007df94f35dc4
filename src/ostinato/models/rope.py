"""The table of rotary angles: cos and sin for every position, computed once in float64 and kept in float32."""

from __future__ import annotations

import math

import torch

from ostinato.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """[rotary_dim / 2] float32 angular frequencies. llama3: the piecewise rule of Llama 3.1's model card: wavelengths
    above `original / low_freq_factor` are stretched by `factor`, below `original / high_freq_factor` kept, and
    blended between."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    inv = 1.0 / (rope.theta**exponent)
    if rope.frequency_divisors is not None:
        return inv / torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    if rope.kind == "linear":
        return inv / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / inv
        original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
        blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - blend) * inv / rope.factor + blend * inv
    return inv


def cos_sin_table(rope: RopeConfig, rotary_dim: int, num_positions: int, device: torch.device) -> torch.Tensor:
    """[num_positions, rotary_dim] float32: cos of each pair, then sin of each pair."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(rope, rotary_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
