"""The fused decode kernels against the ops they replace: on the GPU where there is one, else in the interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from decode_fused_case import DEVICE, EPS, FusedCase, make_case
from torch import Tensor

from ostinato.kernels import reference_attention

triton = pytest.importorskip("triton", reason="triton is not installed")
if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without its interpreter and there is no GPU", allow_module_level=True)

from ostinato.kernels import triton_attention, triton_elementwise, triton_kv_write  # noqa: E402
from ostinato.kernels.triton_decode_fused import decode_attention, fused_config  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's own
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# The interpreter gets bfloat16 arithmetic wrong.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
# The interpreter has no programmatic launch.
PDL = [False, *([True] if DEVICE == "cuda" else [])]


def counters(case: FusedCase) -> Tensor:
    return torch.zeros(case.num_rows * case.k.shape[1] + 1, dtype=torch.int32, device=DEVICE)


def assert_matches_reference(case: FusedCase, num_splits: int = 1, merged: bool = True, pdl: bool = False) -> Tensor:
    """Output and pool as the reference's; every cell but the step's own is untouched, bit for bit."""
    counts = counters(case) if merged else None
    out, pool = case.on(DEVICE).run(decode_attention, num_splits, counts, pdl)
    expected, expected_pool = case.on("cpu").run(reference_attention.decode_attention)
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(pool, expected_pool, atol=tolerance, rtol=tolerance, equal_nan=True)
    written = cells(case)
    assert torch.equal(bits(pool)[~written], bits(case.pool)[~written]), "wrote to a cell that is not the step's"
    if counts is not None:
        assert not counts.any(), "the next replay would find counts left over"
    return out


def bits(pool: Tensor) -> Tensor:
    return pool.view(torch.int32 if pool.element_size() == 4 else torch.int16)


def cells(case: FusedCase) -> Tensor:
    """Which of the pool's elements belong to the step's slots."""
    slots = case.slot_mapping[case.slot_mapping >= 0].long()
    mask = torch.zeros(case.pool.shape, dtype=torch.bool)
    mask[slots // case.pool.shape[2], :, slots % case.pool.shape[2]] = True
    return mask


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_size", "group", "rotated", "norm"),
    [(64, 4, 64, False), (128, 2, 128, True), (80, 1, 80, False), (96, 3, 48, True), (64, 3, 20, False)],
)
def test_every_head_shape(head_size: int, group: int, rotated: int, norm: bool, dtype: torch.dtype) -> None:
    case = make_case([70, 0, 17], group=group, head_size=head_size, rotated=rotated, norm=norm, dtype=dtype)
    assert_matches_reference(case, num_splits=2)


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("num_splits", [1, 2, 4, 7])
def test_any_number_of_splits(num_splits: int, merged: bool) -> None:
    """Fewer tiles than splits, as many, and more; a padded row; rows that begin and end on a tile's edge."""
    case = make_case([71, 0, 16, 1, 65], group=3)
    out = assert_matches_reference(case, num_splits, merged)
    assert not out[1].any()


@pytest.mark.parametrize("merged", [True, False])
def test_more_parts_than_are_merged_at_a_time(merged: bool) -> None:
    assert fused_config(1, 3, 64, 32, element_size=4).chunk < 12
    assert_matches_reference(make_case([193, 16, 177], group=3), num_splits=12, merged=merged)


@pytest.mark.parametrize(("query_len", "group"), [(2, 3), (3, 1), (5, 4), (8, 2)])
@pytest.mark.parametrize("seq_lens", [[0, 33, 49], [8, 17, 40]])
def test_several_tokens_a_row(query_len: int, group: int, seq_lens: Sequence[int]) -> None:
    """The step's tokens straddle blocks and tiles; each query sees those before it."""
    lens = [n and max(n, query_len) for n in seq_lens]
    case = make_case(lens, query_len, group=group, norm=query_len == 3, dtype=torch.float16)
    assert_matches_reference(case, num_splits=1 + query_len % 3, merged=query_len % 2 == 0)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 18, 31, 33, 64])
def test_around_block_edges(length: int) -> None:
    assert_matches_reference(make_case([length, max(length - 1, 0), length + 1], group=2), num_splits=3)


def test_queries_that_see_nothing_are_zero() -> None:
    """Lengths below the query length: the first queries stand before position 0."""
    case = make_case([2, 0, 20], query_len=4)
    out = assert_matches_reference(case, num_splits=2)
    assert not out[:2].any()


def test_tokens_without_a_place_are_not_written() -> None:
    """A row at the model's limit: its last tokens have no slot, and its length stops there."""
    case = make_case([20, 33, 5], query_len=4, num_known=[2, 0, 4])
    assert_matches_reference(case, num_splits=2)


def test_tokens_behind_the_last_row_are_cleared() -> None:
    out = assert_matches_reference(make_case([20, 5, 9], query_len=2, num_pad_tokens=3))
    assert not out[-3:].any()


def test_strides_come_from_the_tensors() -> None:
    """Three key heads, and a cache that is one half of a pool."""
    assert_matches_reference(make_case([21, 4, 40], num_kv_heads=3, group=2), num_splits=2)


def test_counters_serve_one_call_after_another() -> None:
    """As graph replays do: the same workspace, rows of other lengths."""
    first, second = make_case([70, 40, 1]), make_case([3, 65, 0], seed=1)
    counts = counters(first)
    for case in (first, second, first):
        out, _ = case.on(DEVICE).run(decode_attention, 4, counts)
        expected, _ = case.on("cpu").run(reference_attention.decode_attention)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
        assert not counts.any()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_the_kernels_it_replaces(dtype: torch.dtype, norm: bool) -> None:
    """The cache gets the same bits, but where a norm's sum has another order; so does the output's."""

    def chain(
        q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, q_norm: Tensor | None,
        k_norm: Tensor | None, eps: float, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor,
        row_slot: Tensor, seq_lens: Tensor, scale: float, query_len: int, num_rows: int, num_splits: int, out: Tensor,
        counts: Tensor | None, pdl: bool,
    ) -> None:  # fmt: skip
        q, k = q.clone(), k.clone()
        triton_elementwise.rope(q, k, positions, cos_sin, q_norm, k_norm, eps)
        triton_kv_write.kv_write(k, v, k_cache, v_cache, slot_mapping)
        triton_attention.attention(
            q, k_cache, v_cache, block_table, row_slot, row_slot, seq_lens, scale, query_len, num_rows, num_splits, out
        )

    case = make_case([70, 0, 33], num_kv_heads=2, group=2, norm=norm, dtype=dtype)
    out, pool = case.on(DEVICE).run(decode_attention, 2, counters(case))
    expected, expected_pool = case.on(DEVICE).run(chain, 2)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, atol=4 * ulp, rtol=4 * ulp)
    torch.testing.assert_close(pool, expected_pool, atol=ulp, rtol=2 * ulp, equal_nan=True)
    if DEVICE == "cpu" or dtype != torch.float32:  # in float32 no rounding hides the order of a norm's sum
        same = (bits(pool) == bits(expected_pool)).float().mean()
        assert same > 0.999, f"{1 - same:.4%} of the pool differs"


def test_config_follows_the_shape() -> None:
    plain = fused_config(1, 4, 128, 64, 2)
    assert (plain.new_pad, plain.live_pad, plain.vector) == (16, 4, 8)
    assert fused_config(8, 16, 128, 64, 2).live_pad == 128
    assert fused_config(1, 3, 96, 10, 2).vector == 2 and EPS > 0


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("pdl", PDL)
@pytest.mark.parametrize("merged", [True, False])
def test_replays_of_a_graph_agree(pdl: bool, merged: bool) -> None:
    """Many rows and splits at once: every replay gives the same bits, and lengths may change between replays."""
    lens = [1000, 0, 1, 517, 64, 2049, 129, 33] * 4
    case = make_case(lens, num_kv_heads=8, group=4, head_size=128, dtype=torch.bfloat16)
    live, counts, out = case.on(DEVICE), counters(case), torch.empty(case.q.shape, dtype=case.q.dtype, device=DEVICE)

    def step() -> None:
        for _ in range(3):
            decode_attention(
                live.q, live.k, live.v, live.positions, live.cos_sin, None, None, EPS, live.slot_mapping,
                live.pool[:, 0], live.pool[:, 1], live.block_table, live.row_slot, live.seq_lens, live.scale, 1,
                live.num_rows, 9, out, counts if merged else None, pdl,
            )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    expected, _ = case.on("cpu").run(reference_attention.decode_attention)
    first = None
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out.cpu(), expected, atol=3e-2, rtol=3e-2)
        first = out.clone() if first is None else first
        assert torch.equal(out, first)
        assert not counts.any()
