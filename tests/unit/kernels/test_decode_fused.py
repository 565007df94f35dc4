"""The fused decode kernels against the ops they replace: on the GPU where there is one, else in the interpreter."""

from __future__ import annotations

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


def assert_matches_reference(case: FusedCase, num_splits: int = 1, pdl: bool = False) -> Tensor:
    """Output and pool as the reference's; every cell but the step's own is untouched, bit for bit."""
    live = case.on(DEVICE)
    counts = live.counters()
    out, pool = live.run(decode_attention, num_splits, counts, pdl)
    expected, expected_pool = case.on("cpu").run(reference_attention.decode_attention)
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(pool, expected_pool, atol=tolerance, rtol=tolerance, equal_nan=True)
    written = cells(case)
    assert torch.equal(bits(pool)[~written], bits(case.pool)[~written]), "wrote to a cell that is not the step's"
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


@pytest.mark.parametrize("num_splits", [1, 2, 4, 7])
def test_any_number_of_splits(num_splits: int) -> None:
    """Fewer tiles than splits, as many, and more; a padded row; rows that begin and end on a tile's edge."""
    out = assert_matches_reference(make_case([71, 0, 16, 1, 65, 32, 33], group=3), num_splits)
    assert not out[1].any()


def test_more_parts_than_are_merged_at_a_time() -> None:
    assert fused_config(3, 3, 64, 32, 4, norm=False).chunk < 12
    assert_matches_reference(make_case([193, 16, 177], group=3), num_splits=12)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 18, 31, 33, 64])
def test_around_block_edges(length: int) -> None:
    assert_matches_reference(make_case([length, max(length - 1, 0), length + 1], group=2), num_splits=3)


def test_a_token_without_a_place_is_not_written() -> None:
    """A row at the model's limit: its token has no slot, and what the cache holds there is what is attended to."""
    assert_matches_reference(make_case([20, 33, 5], without_slot=[1]), num_splits=2)


def test_rows_behind_the_last_are_cleared() -> None:
    out = assert_matches_reference(make_case([20, 5, 9], num_pad_tokens=3))
    assert not out[-3:].any()


def test_strides_come_from_the_tensors() -> None:
    """Three key heads, and a cache that is one half of a pool."""
    assert_matches_reference(make_case([21, 4, 40], num_kv_heads=3, group=2), num_splits=2)


def test_counters_serve_one_call_after_another() -> None:
    """As graph replays do: the same workspace, rows of other lengths."""
    first, second = make_case([70, 40, 1]), make_case([3, 65, 0], seed=1)
    counts = first.on(DEVICE).counters()
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
        row_slot: Tensor, seq_lens: Tensor, scale: float, num_rows: int, num_splits: int, out: Tensor,
        counts: Tensor, pdl: bool,
    ) -> None:  # fmt: skip
        q, k = q.clone(), k.clone()
        triton_elementwise.rope(q, k, positions, cos_sin, q_norm, k_norm, eps)
        triton_kv_write.kv_write(k, v, k_cache, v_cache, slot_mapping)
        triton_attention.attention(
            q, k_cache, v_cache, block_table, row_slot, row_slot, seq_lens, scale, 1, num_rows, num_splits, out
        )

    case = make_case([70, 0, 33], num_kv_heads=2, group=2, norm=norm, dtype=dtype)
    out, pool = case.on(DEVICE).run(decode_attention, 2)
    expected, expected_pool = case.on(DEVICE).run(chain, 2)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, atol=4 * ulp, rtol=4 * ulp)
    torch.testing.assert_close(pool, expected_pool, atol=ulp, rtol=2 * ulp, equal_nan=True)
    if DEVICE == "cpu" or dtype != torch.float32:  # in float32 no rounding hides the order of a norm's sum
        same = (bits(pool) == bits(expected_pool)).float().mean()
        assert same > 0.999, f"{1 - same:.4%} of the pool differs"


def test_config_follows_the_shape() -> None:
    plain = fused_config(1, 4, 128, 64, 2, norm=False)
    assert (plain.live_pad, plain.vector) == (4, 8)
    assert fused_config(1, 3, 96, 10, 2, norm=False).vector == 2
    for head_size in (64, 128, 256):
        for norm in (False, True):
            many, few = (fused_config(num_rows, 4, head_size, 32, 2, norm).tiles for num_rows in (64, 4))
            assert many.tile == few.tile and few.tile * head_size <= 8192 and many.num_warps <= few.num_warps


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("pdl", PDL)
def test_replays_of_a_graph_agree(pdl: bool) -> None:
    """Many rows and splits at once: every replay gives the same bits, and lengths may change between replays."""
    lens = [1000, 0, 1, 517, 64, 2049, 129, 33] * 4
    case = make_case(lens, num_kv_heads=8, group=4, head_size=128, dtype=torch.bfloat16)
    live = case.on(DEVICE)
    counts, out = live.counters(), torch.empty(case.q.shape, dtype=case.q.dtype, device=DEVICE)

    def step() -> None:
        for _ in range(3):
            decode_attention(
                live.q, live.k, live.v, live.positions, live.cos_sin, None, None, EPS, live.slot_mapping,
                live.pool[:, 0], live.pool[:, 1], live.block_table, live.row_slot, live.seq_lens, live.scale,
                live.num_rows, 9, out, counts, pdl,
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
