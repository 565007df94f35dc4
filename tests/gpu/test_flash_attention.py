"""FlashAttention-3 for prompts: what it reads and writes, in graphs and between them, and the engine that uses it.

Pools are full of NaN wherever no row may read: behind each row's last position in its last block, in all other blocks
and in the other layer. `test_ops_attention.py` has the shapes that both backends share.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import LLM
from ostinato.kernels import ops

from ..e2e.driving import greedy, modes_of
from ..e2e.models import TinyModel, prompts_of
from .conftest import ModelFactory
from .op_cases import AttentionCase, assert_close, attention_case, need_flash, normal
from .test_engine import NEAR_TIE, V, assert_near_oracle, assert_same_up_to_near_ties
from .test_inspect import inspect
from .test_ops_attention import FACTOR, check_flash
from .test_prepared import own_caches, plan, slots_of, tiles_of, workspace

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _needs_it(device: torch.device) -> None:
    need_flash(device)


# -- the op ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_padded_tokens", [0, 1, 200])
@pytest.mark.parametrize(
    ("lengths", "query_lens"),
    [
        ([2048], [2048]),
        ([1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129], [1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129]),
        ([4096 + 512, 513, 8000], [512, 512, 1]),
        ([3, 0, 50, 0], [5, 4, 43, 0]),  # queries that see nothing; a row of queries without keys
        ([0, 0, 0], [0, 0, 0]),
        ([300] * 40, [7] * 40),
    ],
)
def test_rows_of_any_length(
    device: torch.device, lengths: list[int], query_lens: list[int], num_padded_tokens: int
) -> None:
    if sum(query_lens) + num_padded_tokens == 0:
        num_padded_tokens = 3
    case = attention_case(
        BF16, lengths, query_lens=query_lens, num_heads=8, num_kv_heads=2, head_size=128,
        num_padded_tokens=num_padded_tokens,
    )  # fmt: skip
    check_flash(case, device)
    out = case.on(device).run_flash()
    assert not out[len(out) - num_padded_tokens :].any(), "padding gets zeros"


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_every_block_size_that_is_let_through(device: torch.device, head_size: int, block_size: int) -> None:
    """Values behind a row's end are NaN: one that were loaded and weighted with 0 would show."""
    lengths = [*range(120, 137), 1, 65, 255]
    case = attention_case(
        BF16, lengths, query_lens=[min(length, 40) for length in lengths], num_heads=4, num_kv_heads=2,
        head_size=head_size, block_size=block_size,
    )  # fmt: skip
    check_flash(case, device)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 16])
def test_groups(device: torch.device, group: int) -> None:
    case = attention_case(
        torch.float16, [200, 333, 70], query_lens=[200, 100, 1], num_heads=2 * group, num_kv_heads=2, head_size=64
    )
    check_flash(case, device)


def test_as_many_rows_as_are_let_through(device: torch.device) -> None:
    num_rows = 991
    lengths = [length % 90 for length in range(num_rows)]
    query_lens = [length if row % 7 == 0 else min(length, 1) for row, length in enumerate(lengths)]
    case = attention_case(
        BF16, lengths, query_lens=query_lens, num_heads=4, num_kv_heads=2, head_size=64, num_padded_tokens=5
    )
    check_flash(case, device)


def test_rows_of_one_token_are_left_out_if_asked(device: torch.device) -> None:
    """They keep what they have; the others and the padding have the same bits as with them."""
    query_lens = [1, 130, 1, 0, 1, 40]
    case = attention_case(
        BF16, [70, 400, 1, 0, 900, 40], query_lens=query_lens, num_heads=8, num_kv_heads=2, head_size=128,
        num_padded_tokens=1,
    ).on(device)  # fmt: skip
    with_all, without = case.run_flash(), case.run_flash(singles=False)
    ones = [int(case.query_start[row]) for row, count in enumerate(query_lens) if count == 1]
    assert bool(without[ones].isnan().all())
    with_all[ones] = float("nan")
    assert torch.equal(without.nan_to_num(9.0), with_all.nan_to_num(9.0))


def test_queries_and_outputs_are_views(device: torch.device) -> None:
    """As in a step: queries are a part of each row of [T, (H + 2G) * D]."""
    case = attention_case(BF16, [300, 90], query_lens=[300, 20], num_heads=6, num_kv_heads=2, head_size=64).on(device)
    num_tokens, num_heads, head_size = case.q.shape
    wide = torch.full((num_tokens, num_heads + 4, head_size), float("nan"), dtype=BF16, device=device)
    out = torch.full((num_tokens, num_heads, head_size + 16), float("nan"), dtype=BF16, device=device)
    wide[:, :num_heads] = case.q
    args = (case.k_cache, case.v_cache, case.flash_rows(), case.scale)
    ops.flash_attention(wide[:, :num_heads], *args, out[..., :head_size])
    assert torch.equal(out[..., :head_size], case.run_flash())
    assert bool(out[..., head_size:].isnan().all()), "wrote outside `out`"


def test_a_row_has_the_same_bits_in_any_step(device: torch.device) -> None:
    """Which is what a check of padded replays against eager steps rests on."""
    lengths, query_lens = [700, 130, 64], [300, 130, 20]
    case = attention_case(BF16, lengths, query_lens=query_lens, num_heads=8, num_kv_heads=2, head_size=128).on(device)
    whole, start = case.run_flash(), 0
    for row, count in enumerate(query_lens):
        alone = AttentionCase(
            q=case.q[start : start + count],
            k_cache=case.k_cache,
            v_cache=case.v_cache,
            block_table=case.block_table,
            row_slot=case.row_slot[row:],
            query_start=case.query_start.new_tensor([0, count]),
            seq_lens=case.seq_lens[row:],
            scale=case.scale,
            query_len=0,
            num_rows=1,
        )
        assert torch.equal(alone.run_flash(), whole[start : start + count])
        start += count


def test_one_graph_serves_every_step(device: torch.device) -> None:
    """Recorded over padding, with the plan inside; replayed for other rows, lengths and tables there."""
    steps = [
        ([512, 0, 0, 0], [512, 0, 0, 0]),
        ([100, 2000, 30, 1], [100, 300, 30, 1]),
        ([700, 700, 700, 0], [1, 1, 200, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([64, 64, 64, 320], [64, 64, 64, 320]),
    ]
    cases = [
        attention_case(
            BF16, lengths, query_lens=each, num_heads=8, num_kv_heads=2, head_size=128, width=130,
            num_padded_tokens=512 - sum(each), seed=index,
        )
        for index, (lengths, each) in enumerate(steps)
    ]  # fmt: skip
    largest = max(cases, key=lambda case: len(case.k_cache)).on(device)
    rows, out = largest.flash_rows(), torch.empty_like(largest.q)

    def step() -> None:
        largest.plan_flash(rows)
        ops.flash_attention(largest.q, largest.k_cache, largest.v_cache, rows, largest.scale, out)

    largest.seq_lens.zero_()
    largest.query_start.zero_()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for case in [*cases, *cases[::-1]]:
        for name in ("q", "block_table", "row_slot", "query_start", "seq_lens"):
            getattr(largest, name).copy_(getattr(case, name))
        for cache, source in ((largest.k_cache, case.k_cache), (largest.v_cache, case.v_cache)):
            cache.fill_(float("nan"))
            cache[: source.shape[0]] = source.to(device)
        out.fill_(float("nan"))
        for _ in range(2):
            graph.replay()
        assert_close(out, case.reference(), BF16, FACTOR, f"lengths {case.seq_lens.tolist()}")
        assert torch.equal(out, largest.run_flash()), "the graph and the call differ"


def test_between_two_graphs(device: torch.device) -> None:
    """The prepared launches around it, on a stream that is not the default one, against the three ops."""
    from functools import partial

    from ostinato.kernels.triton_attention import prepared_around
    from ostinato.kernels.triton_decode_tiles import attend_tiles_call
    from ostinato.kernels.triton_kv_write import kv_write_call

    case = attention_case(
        BF16, [70, 333, 900, 4, 5, 0, 0], query_lens=[1, 300, 1, 4, 1, 0, 0], num_heads=8, num_kv_heads=2,
        head_size=64, num_padded_tokens=1,
    ).on(device)  # fmt: skip
    k, v = (normal(case.q.shape[0], 2, 64, seed=seed, dtype=BF16).to(device) for seed in (7, 8))
    slots, out, expected = slots_of(case), torch.full_like(case.q, float("nan")), torch.full_like(case.q, float("nan"))
    (counters, partials), tiles, rows = workspace(case, 2 * 7), tiles_of(case, 7), case.flash_rows(singles=False)
    plan(case, tiles)
    over, caches = (tiles, case.query_start, case.scale, 0, case.num_rows), own_caches(case)
    ops.kv_write(k, v, *caches, slots)
    ops.flash_attention(case.q, *caches, rows, case.scale, expected)
    ops.attend_tiles(case.q, *caches, *over, expected, counters, partials)
    own = (case.k_cache, case.v_cache)
    run = prepared_around(
        kv_write_call(k, v, *own, slots, None),
        partial(ops.flash_attention, case.q, *own, rows, case.scale, out),
        attend_tiles_call(case.q, *own, *over, out, counters, partials, None),
        device,
    )
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        run()
        done = torch.cuda.Event()
        done.record()
    assert not done.query(), "launched on another stream than the current one"
    done.synchronize()
    assert torch.equal(out, expected) and bool(out.isfinite().all())


# -- the engine --------------------------------------------------------------------------------------------------------

PROMPTS = prompts_of((300, 17, 700, 1, 270, 64, 512), V, seed=61)
KEY = "mixed:512"


def open_llm(model: TinyModel, device: torch.device, dtype: str, mode: str, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "device": str(device),
        "dtype": dtype,
        "max_model_len": 1024,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 260,
        "cudagraph_capture_sizes": [1, 2, 5, 16, 256, 512],
        "cudagraph_mode": mode,
        "check": 3,
        **options,
    }
    return LLM(str(model.path), **settings)


@pytest.mark.parametrize("cut", ["attention", "kv_gather"])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bfloat16"), (128, "bfloat16"), (80, "float16")])
def test_the_same_tokens_as_with_our_kernels(
    small_model: ModelFactory, device: torch.device, head_dim: int, dtype: str, cut: str
) -> None:
    """Chunks, prompts beside running requests, prefix hits, under check with NaN wherever a row must not read."""
    model, params = small_model(head_dim=head_dim), greedy(30, logprobs=5)
    with open_llm(model, device, dtype, "NONE", attention_backend="TRITON_ATTN", cudagraph_cut=cut) as llm:
        assert llm.stats().attention_backend == "TRITON_ATTN"
        ours = llm.generate(PROMPTS, params)
    for mode in ("NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"):
        with open_llm(model, device, dtype, mode, attention_backend="FLASH_ATTN", cudagraph_cut=cut) as llm:
            assert llm.stats().attention_backend == "FLASH_ATTN"
            outputs, again = llm.generate(PROMPTS, params), llm.generate(PROMPTS, params)
            assert mode == "NONE" or (llm.stats().num_checked >= 3 and modes_of(llm))
            assert bool(llm.engine.runner.buffers.flash_page_table.any())
        assert_near_oracle(model, outputs, NEAR_TIE[dtype])
        assert_same_up_to_near_ties(ours, outputs, NEAR_TIE[dtype])
        assert_same_up_to_near_ties(outputs, again, NEAR_TIE[dtype])


def test_auto_takes_it_where_it_can(small_model: ModelFactory, device: torch.device) -> None:
    model = small_model()
    for options, backend in (
        ({}, "FLASH_ATTN"),
        ({"dtype": "float32"}, "TRITON_ATTN"),
        ({"kv_cache_dtype": "fp8"}, "TRITON_ATTN"),
        ({"batch_invariant": True}, "TRITON_ATTN"),
        ({"block_size": 64}, "TRITON_ATTN"),
    ):
        with open_llm(model, device, **{"dtype": "bfloat16", "mode": "NONE", **options}) as llm:
            assert llm.stats().attention_backend == backend, options


def test_it_is_in_the_graphs_of_large_keys(small_model: ModelFactory, device: torch.device, tmp_path: Any) -> None:
    words = ("--cudagraph-mode", "FULL", "--max-num-batched-tokens", "512", "--cudagraph-capture-sizes", "4/16,512",
             "--dtype", "bfloat16", "--max-num-seqs", "4")  # fmt: skip
    for key, flash in ((KEY, True), ("mixed:16", False)):
        nodes = inspect(small_model().path, tmp_path, "--key", key, *words)["nodes"]
        names = [node["name"] for node in nodes if node["kind"] == "kernel"]
        assert sum("FlashAttnFwdSm90" in name for name in names) == (2 if flash else 0), key
        assert names.count("prefill_kernel") == (0 if flash else 2), key
        assert names.count("plan_flash_kernel") == int(flash), key
