"""Norms, rotary embedding and SwiGLU: the references against the formulas, the kernels against the references."""

from __future__ import annotations

import pytest
import torch
from ops_case import TORCH, TRITON, require_triton
from torch import Tensor

EPS = 1e-5
CPU_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The interpreter's bfloat16 arithmetic is wrong, so that the kernels see it only on a GPU.
KERNEL_DTYPES = CPU_DTYPES if TRITON.device == "cuda" else CPU_DTYPES[:2]
# One rounding step of outputs of size 4: kernels and references may round the last bit differently.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected, atol=TOLERANCE[expected.dtype], rtol=1e-5)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", CPU_DTYPES, ids=str)
def test_rms_norm_rounds_before_the_weight(dtype: torch.dtype) -> None:
    x, weight = normal(5, 37, dtype=dtype), normal(37, dtype=dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    close(TORCH.rms_norm(x, weight, EPS), weight * exact.to(dtype))


def test_add_rms_norm_carries_the_rounded_sum() -> None:
    x, residual, weight = (normal(n, 24, dtype=torch.bfloat16) for n in (3, 3, 1))
    total = x + residual
    out = TORCH.add_rms_norm(x, residual, weight[0], EPS)
    assert torch.equal(residual, total)
    assert torch.equal(out, TORCH.rms_norm(total, weight[0], EPS))


@pytest.mark.parametrize("rotated", [16, 6])
def test_rope_turns_pairs_of_halves_and_leaves_the_rest(rotated: int) -> None:
    q, k = normal(4, 3, 16), normal(4, 1, 16)
    angles = normal(9, rotated // 2)
    positions = torch.tensor([8, 0, 3, 3, 7, 7], dtype=torch.int32)  # longer than T
    half, expected = rotated // 2, q.clone()
    for t in range(4):
        turn = torch.polar(torch.ones(half), angles[int(positions[t])])
        turned = torch.complex(q[t, :, :half], q[t, :, half:rotated]) * turn
        expected[t, :, :half], expected[t, :, half:rotated] = turned.real, turned.imag
    TORCH.rope(q, k, positions, torch.cat((angles.cos(), angles.sin()), -1), None, None, 0.0)
    close(q, expected)


def test_rope_normalises_first_if_asked() -> None:
    q, k, cos_sin = normal(3, 5, 8), normal(3, 2, 8), normal(4, 8)
    q_weight, k_weight = normal(8), normal(8) + 1
    positions = torch.tensor([2, 1, 3], dtype=torch.int32)
    normed_q, normed_k = TORCH.rms_norm(q, q_weight, EPS), TORCH.rms_norm(k, k_weight, EPS)
    TORCH.rope(normed_q, normed_k, positions, cos_sin, None, None, 0.0)
    TORCH.rope(q, k, positions, cos_sin, q_weight, k_weight, EPS)
    assert torch.equal(q, normed_q) and torch.equal(k, normed_k)


def test_silu_mul_rounds_silu() -> None:
    gate_up = normal(3, 22, dtype=torch.bfloat16)
    gate, up = gate_up[:, :11], gate_up[:, 11:]
    silu = (gate.float() * gate.float().sigmoid()).bfloat16()
    close(TORCH.silu_mul(gate_up), silu * up)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("size", [7, 96, 577])
def test_norm_kernels(size: int, dtype: torch.dtype) -> None:
    require_triton()
    wide, residual, weight = normal(3, size + 5, dtype=dtype), normal(3, size, dtype=dtype), normal(size, dtype=dtype)
    device = TRITON.device
    x, carried = wide.to(device)[:, :size], residual.clone().to(device)
    close(TRITON.rms_norm(x, weight.to(device), EPS), TORCH.rms_norm(wide[:, :size], weight, EPS))
    out = TRITON.add_rms_norm(x, carried, weight.to(device), EPS)
    close(out, TORCH.add_rms_norm(wide[:, :size], residual, weight, EPS))
    assert torch.equal(carried.cpu(), residual)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_q", "num_k", "head_size", "rotated", "norm"),
    [(9, 3, 64, 64, False), (5, 1, 80, 80, True), (3, 3, 96, 48, True), (10, 2, 16, 4, False)],
)
def test_rope_kernel(num_q: int, num_k: int, head_size: int, rotated: int, norm: bool, dtype: torch.dtype) -> None:
    require_triton()
    fused = normal(3, num_q + 2 * num_k, head_size, dtype=dtype)
    on_device = fused.clone().to(TRITON.device)
    angles = normal(11, rotated // 2)
    cos_sin, positions = torch.cat((angles.cos(), angles.sin()), -1), TRITON.ints(10, 0, 4, 4)
    weights = (normal(head_size, dtype=dtype), normal(head_size, dtype=dtype) + 1) if norm else (None, None)
    TORCH.rope(fused[:, :num_q], fused[:, num_q : num_q + num_k], positions.cpu(), cos_sin, *weights, EPS)
    moved = tuple(None if weight is None else weight.to(TRITON.device) for weight in weights)
    q, k = on_device[:, :num_q], on_device[:, num_q : num_q + num_k]
    TRITON.rope(q, k, positions, cos_sin.to(TRITON.device), *moved, EPS)
    close(on_device, fused)  # the values, behind the keys, are compared too: nothing may touch them


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("size", [5, 1100])
def test_silu_mul_kernel(size: int, dtype: torch.dtype) -> None:
    require_triton()
    gate_up = 3 * normal(3, 2 * size, dtype=dtype)
    torch.testing.assert_close(
        TRITON.silu_mul(gate_up.to(TRITON.device)).cpu(), TORCH.silu_mul(gate_up), atol=TOLERANCE[dtype], rtol=4e-3
    )


@pytest.mark.parametrize("num_tokens", [0])
def test_no_tokens(num_tokens: int) -> None:
    require_triton()
    for implementation in (TORCH, TRITON):
        x = torch.empty(num_tokens, 8, device=implementation.device)
        weight = torch.ones(8, device=implementation.device)
        assert implementation.rms_norm(x, weight, EPS).shape == (0, 8)
        assert implementation.silu_mul(x).shape == (0, 4)
