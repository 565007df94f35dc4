"""The attention kernels on CUDA against the CPU's in float32: dtypes, head sizes, groups, query and context lengths."""

from __future__ import annotations

import pytest
import torch

from ostinato.kernels import ops
from ostinato.kernels.splits import choose_num_splits

from .op_cases import DTYPES, AttentionCase, assert_close, attention_case, need_flash, normal

FACTOR = 2.0

DECODE = [
    # dtype, query heads, kv heads, head size, query length
    (torch.bfloat16, 8, 8, 64, 1),
    (torch.bfloat16, 9, 3, 64, 1),
    (torch.bfloat16, 32, 8, 128, 1),
    (torch.bfloat16, 16, 1, 128, 2),
    (torch.bfloat16, 4, 2, 80, 3),
    (torch.bfloat16, 6, 2, 96, 8),
    (torch.bfloat16, 5, 1, 64, 5),
    (torch.float16, 14, 2, 64, 1),
    (torch.float16, 8, 2, 128, 4),
    (torch.float16, 3, 3, 96, 1),
    (torch.float16, 16, 1, 80, 8),
    (torch.float32, 9, 3, 64, 1),
    (torch.float32, 4, 4, 128, 2),
    (torch.float32, 6, 1, 80, 7),
]

RAGGED = [
    (torch.bfloat16, 9, 3, 64),
    (torch.bfloat16, 32, 8, 128),
    (torch.bfloat16, 16, 1, 80),
    (torch.float16, 14, 2, 64),
    (torch.float16, 6, 2, 96),
    (torch.float32, 4, 4, 64),
    (torch.float32, 10, 2, 128),
]


def check(case: AttentionCase, device: torch.device, *num_splits: int) -> None:
    expected = case.reference()
    on_device = case.on(device)
    for splits in num_splits:
        ours = on_device.run(splits)
        assert_close(ours, expected, case.q.dtype, FACTOR, f"{splits} splits")
        assert torch.equal(ours, on_device.run(splits)), "two runs of the same kernel differ"


def check_flash(case: AttentionCase, device: torch.device) -> None:
    expected, on_device = case.reference(), case.on(device)
    ours = on_device.run_flash()
    assert_close(ours, expected, case.q.dtype, FACTOR, "FlashAttention")
    assert torch.equal(ours, on_device.run_flash()), "two runs differ"


@pytest.mark.parametrize(("dtype", "num_heads", "num_kv_heads", "head_size", "query_len"), DECODE)
def test_decode(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_size: int, query_len: int
) -> None:
    """Short and long rows, block borders, a padded row in the middle, tokens past the rows; 1, 3 and 8 splits."""
    lengths = [query_len, 17, 0, 16 + query_len, 48, 257, 1024, 4096 if dtype != torch.float32 else 2000]
    lengths = [length if length == 0 else max(length, query_len) for length in lengths]
    case = attention_case(
        dtype,
        lengths,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        query_len=query_len,
        num_padded_tokens=2,
        seed=head_size + query_len,
    )
    check(case, device, 1, 3, 8)


@pytest.mark.parametrize(
    ("backend", "dtype", "num_heads", "num_kv_heads", "head_size"),
    [("TRITON_ATTN", *case) for case in RAGGED]
    + [("FLASH_ATTN", *case) for case in RAGGED if case[0] is not torch.float32]
    + [("FLASH_ATTN", torch.float16, 4, 2, 192), ("FLASH_ATTN", torch.bfloat16, 8, 8, 256)],
)
def test_ragged(
    device: torch.device, backend: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_size: int
) -> None:
    """Whole prompts, chunks of them, single tokens, a row with none, and tokens past the last row."""
    if backend == "FLASH_ATTN":
        need_flash(device)
    query_lens = [1, 17, 64, 0, 130, 1, 5, 33]
    lengths = [300, 17, 200, 0, 130, 1, 1029, 64]
    case = attention_case(
        dtype,
        lengths,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        query_lens=query_lens,
        num_padded_tokens=9,
        seed=head_size,
    )
    if backend == "FLASH_ATTN":
        check_flash(case, device)
    else:
        check(case, device, 1)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
def test_groups(device: torch.device, group: int) -> None:
    case = attention_case(
        torch.bfloat16, [1, 33, 500], num_heads=2 * group, num_kv_heads=2, head_size=64, query_len=1, seed=group
    )
    check(case, device, 1, 4)


def test_one_graph_serves_every_length(device: torch.device) -> None:
    """Length sweep: one graph, recorded at rows of [1, 17, n - 1, n], replayed for n from 16 to 8192."""
    width = 8192 // 16
    splits = choose_num_splits(4, 2, width, torch.cuda.get_device_properties(device).multi_processor_count)
    cases = [
        attention_case(
            torch.bfloat16,
            [1, 17, n - 1, n],
            num_heads=6,
            num_kv_heads=2,
            head_size=64,
            query_len=1,
            width=width,
            seed=n,
        )
        for n in (16, 64, 100, 1024, 4097, 8192)
    ]
    largest = cases[-1].on(device)
    out = torch.empty_like(largest.q)

    def step() -> None:
        ops.attention(
            largest.q, largest.k_cache, largest.v_cache, largest.block_table, largest.row_slot, largest.query_start,
            largest.seq_lens, largest.scale, 1, 4, splits, out,
        )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case in [*cases, *cases[::-1]]:
        for name in ("q", "block_table", "row_slot", "seq_lens"):
            getattr(largest, name).copy_(getattr(case, name))
        for cache, source in ((largest.k_cache, case.k_cache), (largest.v_cache, case.v_cache)):
            cache.fill_(float("nan"))
            cache[: source.shape[0]] = source.to(device)
        out.fill_(float("nan"))
        graph.replay()
        assert_close(out, case.reference(), torch.bfloat16, FACTOR, f"lengths {case.seq_lens.tolist()}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_write(device: torch.device, dtype: torch.dtype) -> None:
    """Odd heads and sizes; padded tokens write nothing; every other cell keeps its bits."""
    for num_kv_heads, head_size in ((1, 64), (3, 80), (8, 128)):
        k = normal(37, num_kv_heads, head_size, seed=1, dtype=dtype)
        v = normal(37, num_kv_heads, head_size, seed=2, dtype=dtype)
        slots = torch.randperm(9 * 16, generator=torch.Generator().manual_seed(3))[:50].int()
        slots[[0, 5, 36]] = -1
        expected = torch.full((9, 2, 16, num_kv_heads, head_size), float("nan"), dtype=dtype)
        ours = expected.to(device)
        ops.kv_write(k, v, expected[:, 0], expected[:, 1], slots)
        ops.kv_write(k.to(device), v.to(device), ours[:, 0], ours[:, 1], slots.to(device))
        kind = torch.int32 if dtype is torch.float32 else torch.int16
        assert torch.equal(ours.cpu().view(kind), expected.view(kind))
