"""Both implementations of `kv_write`: the named cells change, all others keep every bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention_case import DEVICE
from torch import Tensor

from ostinato.kernels import reference_attention

BLOCK_SIZE = 16


def triton_kv_write(*tensors: Tensor) -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported without its interpreter and there is no GPU")
    from ostinato.kernels.triton_kv_write import kv_write

    kv_write(*tensors)


@pytest.fixture(params=[(reference_attention.kv_write, "cpu"), (triton_kv_write, DEVICE)], ids=["torch", "triton"])
def implementation(request: pytest.FixtureRequest) -> tuple[Callable[..., None], str]:
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("num_heads", "head_size"), [(1, 64), (3, 80), (8, 128)])
def test_writes_the_named_cells_and_nothing_else(
    implementation: tuple[Callable[..., None], str], num_heads: int, head_size: int, dtype: torch.dtype
) -> None:
    kv_write, device = implementation
    generator = torch.Generator().manual_seed(0)
    slots = [5 * BLOCK_SIZE + 15, -1, BLOCK_SIZE, 0, -1, 3 * BLOCK_SIZE + 7, 3 * BLOCK_SIZE + 8]
    num_tokens = len(slots)
    qkv = torch.randn((num_tokens, num_heads + 5, 2, head_size), generator=generator).to(dtype)
    k, v = qkv[:, 5:, 0], qkv[:, 5:, 1]
    pool = torch.randn((6, 2, BLOCK_SIZE, num_heads, head_size), generator=generator).to(dtype)
    expected = pool.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // BLOCK_SIZE, 0, slot % BLOCK_SIZE] = k[token]
            expected[slot // BLOCK_SIZE, 1, slot % BLOCK_SIZE] = v[token]

    pool, qkv = pool.to(device), qkv.to(device)
    # The mapping is as long as the largest step; what lies behind this step's tokens must not be used.
    mapping = torch.tensor([*slots, 2**30, 2 * BLOCK_SIZE], dtype=torch.int32, device=device)
    kv_write(qkv[:, 5:, 0], qkv[:, 5:, 1], pool[:, 0], pool[:, 1], mapping)
    assert torch.equal(pool.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_padded_tokens_alone_write_nothing(implementation: tuple[Callable[..., None], str]) -> None:
    kv_write, device = implementation
    pool = torch.full((2, 2, BLOCK_SIZE, 1, 64), float("nan"), device=device)
    k = torch.ones((3, 1, 64), device=device)
    kv_write(k, k, pool[:, 0], pool[:, 1], torch.full((3,), -1, dtype=torch.int32, device=device))
    assert pool.isnan().all()
