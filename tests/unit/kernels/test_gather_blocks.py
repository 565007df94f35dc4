"""Both implementations of `gather_blocks`, and attention over what they gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attention_case import BLOCK_SIZE, DEVICE, make_case
from torch import Tensor

from ostinato.kernels import reference_attention, reference_blocks
from ostinato.kernels.kv_formats import FP8_E4M3

OUT_OF_RANGE = 2**30


def of_triton(module: str, name: str) -> Callable[..., None]:
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported without its interpreter and there is no GPU")
    found: Callable[..., None] = getattr(__import__(f"ostinato.kernels.{module}", fromlist=[name]), name)
    return found


def triton_gather(*args: Any) -> None:
    of_triton("triton_gather", "gather_blocks")(*args)


@pytest.fixture(params=[(reference_blocks.gather_blocks, "cpu"), (triton_gather, DEVICE)], ids=["torch", "triton"])
def implementation(request: pytest.FixtureRequest) -> tuple[Callable[..., None], str]:
    return request.param


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().cpu().view(torch.uint8)


def gather(
    implementation: tuple[Callable[..., None], str], lengths: Sequence[int], pool: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """What the workspace [R, W, 2, B, G, D] holds, and what it should, from one that was full of 3."""
    op, device = implementation
    num_rows, generator = len(lengths), torch.Generator().manual_seed(1)
    table = torch.full((num_rows + 3, width + 2), OUT_OF_RANGE, dtype=torch.int32)[:, :width]
    slots = torch.randperm(num_rows + 2, generator=generator)[:num_rows].int()
    target = torch.full((num_rows + 1, width, *pool.shape[1:]), 3.0).to(pool.dtype)
    expected = target.clone()
    for row, length in enumerate(lengths):
        for column in range(min(-(-length // BLOCK_SIZE), width)):
            block = int(torch.randint(pool.shape[0], (), generator=generator))
            table[slots[row], column] = block
            expected[row, column] = pool[block]
        if length == 0:
            slots[row] = num_rows + 2  # the scratch row: nothing of its table may be used here
    pool, target = pool.to(device), target.to(device)
    flat = target.flatten(0, 1)
    op(
        pool[:, 0], pool[:, 1], table.to(device), torch.cat([slots, slots.new_tensor([OUT_OF_RANGE])]).to(device),
        torch.tensor([*lengths, OUT_OF_RANGE], dtype=torch.int32, device=device), num_rows, flat[:, 0], flat[:, 1],
    )  # fmt: skip
    return target, expected


LENGTHS = {
    "one": [1],
    "borders": [15, 0, 16, 17],
    "long": [0, 0, 100, 3, 64, 0],
    "padding alone": [0, 0],
    "past the table": [500, 16],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FP8_E4M3.dtype], ids=str)
@pytest.mark.parametrize(("num_heads", "head_size"), [(1, 64), (3, 80), (2, 20)])
def test_every_block_of_every_row_and_nothing_else(
    implementation: tuple[Callable[..., None], str],
    num_heads: int,
    head_size: int,
    dtype: torch.dtype,
    lengths: list[int],
) -> None:
    """From a layer's view of a pool with several, whose NaN are copied like any other bits."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn((9, 2, 2, BLOCK_SIZE, num_heads, head_size), generator=generator)
    pool[:, :, :, ::3] = float("nan")
    found, expected = gather(implementation, lengths, pool.to(dtype)[:, 1], width=7)
    assert torch.equal(bits(found), bits(expected))


def test_more_elements_than_a_program_copies_at_once(implementation: tuple[Callable[..., None], str]) -> None:
    pool = torch.randn((4, 2, BLOCK_SIZE, 5, 112), generator=torch.Generator().manual_seed(0))
    assert pool[0, 0].numel() * 4 > 8192
    found, expected = gather(implementation, [33, 1], pool, width=3)
    assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("query_len", [0, 1])
def test_attention_over_what_was_gathered(implementation: tuple[Callable[..., None], str], query_len: int) -> None:
    """The workspace as a pool with tables of its own: the bits are those of attention over the cache itself."""
    op, device = implementation
    attention = (
        reference_attention.attention
        if op is reference_blocks.gather_blocks
        else of_triton("triton_attention", "attention")
    )
    queries = [1, 1, 1, 1] if query_len else [7, 0, 20, 1]
    case = make_case([70, 0, 20, 33], queries, num_kv_heads=2, group=2, head_size=64, num_pad_tokens=2)
    num_rows, width = 4, case.block_table.shape[1]

    def gathered(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, slots: Tensor, *rest: Any) -> None:
        work = torch.full((num_rows * width, *case.pool.shape[1:]), float("nan"), device=device)
        op(k_cache, v_cache, table, slots, rest[1], num_rows, work[:, 0], work[:, 1])
        own_table = torch.arange(num_rows * width, dtype=torch.int32, device=device).view(num_rows, width)
        own_slots = torch.arange(num_rows, dtype=torch.int32, device=device)
        attention(q, work[:, 0], work[:, 1], own_table, own_slots, *rest)

    out = case.run(gathered, query_len, device=device)
    assert torch.equal(out, case.run(attention, query_len, device=device))
    expected = case.expected()
    torch.testing.assert_close(out.double()[: len(expected)], expected, atol=3e-5, rtol=3e-5)
