"""The Triton attention kernels against the specification: on the GPU where there is one, else in the interpreter."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from attention_case import DEVICE, Attention, AttentionCase, make_case

from ostinato.kernels import reference_attention

triton = pytest.importorskip("triton", reason="triton is not installed")
if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without its interpreter and there is no GPU", allow_module_level=True)

from ostinato.kernels.triton_attention import (  # noqa: E402
    attention,
    prepared_around,
    prepared_decode,
    prepared_ragged,
)
from ostinato.kernels.triton_attention_prefill import prefill_call  # noqa: E402
from ostinato.kernels.triton_decode_tiles import attend_tiles_call  # noqa: E402
from ostinato.kernels.triton_kv_write import kv_write_call  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's own
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# The interpreter gets bfloat16 arithmetic wrong.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
HEADS = [(64, 3), (80, 1), (96, 4), (128, 16), (256, 3)]  # (head size, query heads per key head)


def assert_matches_reference(
    case: AttentionCase,
    query_len: int = 0,
    num_splits: int = 1,
    op: Attention = attention,
) -> torch.Tensor:
    out = case.run(op, query_len, num_splits)
    expected = case.run(reference_attention.attention, query_len, device="cpu")
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_size", "group"), HEADS)
def test_decode_of_every_head_shape(head_size: int, group: int, dtype: torch.dtype) -> None:
    case = make_case([70, 0, 17], [1] * 3, num_kv_heads=1, group=group, head_size=head_size, dtype=dtype)
    assert_matches_reference(case, query_len=1, num_splits=1 if dtype == torch.float32 else 2)


@pytest.mark.parametrize(("query_len", "group"), [(2, 3), (3, 1), (5, 4), (8, 3), (8, 16)])
def test_decode_of_several_queries_a_row(query_len: int, group: int) -> None:
    case = make_case(
        [query_len, 33, 0], [query_len] * 3, num_kv_heads=1, group=group, head_size=64, dtype=torch.float16
    )
    assert_matches_reference(case, query_len, num_splits=1 + query_len % 2)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 4, 5])
def test_decode_with_any_number_of_splits(num_splits: int) -> None:
    """Fewer tiles than splits, as many, and more; a padded row; a row that ends on a tile's edge."""
    case = make_case([70, 0, 16, 1, 64], [1] * 5, num_kv_heads=1, group=3, head_size=64)
    out = assert_matches_reference(case, query_len=1, num_splits=num_splits)
    assert not out[1].any()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48, 63])
def test_decode_around_block_edges(length: int) -> None:
    case = make_case([length, max(length - 1, 0), length + 1], [1] * 3, num_kv_heads=1, group=2, head_size=64)
    assert_matches_reference(case, query_len=1)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode_queries_that_see_nothing_are_zero(num_splits: int) -> None:
    """A length below the query length: the first queries stand before position 0."""
    case = make_case([2, 0, 20], [4] * 3, num_kv_heads=1, group=3, head_size=64)
    out = assert_matches_reference(case, query_len=4, num_splits=num_splits)
    assert not out[:2].any()


def test_decode_clears_tokens_behind_the_last_row() -> None:
    case = make_case([20, 5, 9], [2] * 3, num_kv_heads=1, group=2, head_size=64, num_pad_tokens=3)
    out = assert_matches_reference(case, query_len=2)
    assert not out[-3:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_size", "group"), HEADS)
def test_ragged_of_every_head_shape(head_size: int, group: int, dtype: torch.dtype) -> None:
    case = make_case(
        [37, 0, 40, 6], [1, 0, 13, 6], num_kv_heads=1, group=group, head_size=head_size, dtype=dtype, num_pad_tokens=3
    )
    out = assert_matches_reference(case)
    assert not out[-3:].any()


@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [
        ([1, 1, 1, 1], [1, 1, 1, 1]),
        ([16, 17, 15], [16, 17, 15]),
        ([0, 0, 70, 0], [0, 0, 70, 0]),
        ([70, 33, 2], [3, 33, 1]),
        ([0, 9], [4, 9]),
        ([3, 50], [5, 43]),
    ],
)
def test_ragged_rows_of_any_length(seq_lens: list[int], query_lens: list[int]) -> None:
    """Single tokens, whole prompts, chunks on a cached prefix, empty rows, rows whose queries see nothing."""
    case = make_case(seq_lens, query_lens, num_kv_heads=1, group=3, head_size=64, num_pad_tokens=1)
    assert_matches_reference(case)


@pytest.mark.parametrize("num_pad_tokens", [0, 1, 10, 11, 45])
def test_ragged_padding_is_zero_however_it_falls_on_the_grid(num_pad_tokens: int) -> None:
    """With a group of 3 a float32 query block holds 10 tokens: padding of a part, one, and several blocks."""
    case = make_case([11, 0, 9], [11, 0, 9], num_kv_heads=1, group=3, head_size=64, num_pad_tokens=num_pad_tokens)
    out = assert_matches_reference(case)
    assert not out[20:].any()


SINGLE_ROWS = [
    ([1, 1, 1], [1, 1, 1]),
    ([70, 33, 2, 0, 5], [1, 33, 1, 0, 1]),
    ([0, 300, 9, 17], [1, 3, 1, 17]),
    ([20, 530, 64], [20, 1, 1]),
    ([513, 512, 257, 256, 1], [1, 1, 1, 1, 1]),
]


def with_tiles(case: AttentionCase, num_programs: int) -> Attention:
    """A ragged step as it runs on CUDA: rows of one token over tiles, the others by the ragged kernel."""
    tiles, (counters, partials) = case.tiles(0, 32, num_programs), case.workspace(num_programs)

    def op(*args: Any) -> None:
        q, k_cache, v_cache, _, _, query_start, _, scale, query_len, num_rows, _, out = args
        attention(*args, singles=False)
        over = (q, k_cache, v_cache, tiles, query_start, scale, query_len, num_rows, out, counters, partials)
        attend_tiles_call(*over, None)()
        assert not counters.any()

    return op


@pytest.mark.parametrize(("seq_lens", "query_lens"), SINGLE_ROWS)
def test_ragged_rows_of_one_token_are_left_out_if_asked(seq_lens: list[int], query_lens: list[int]) -> None:
    """The other rows and the padding get what they get without that; what those get is not said."""
    case = make_case(seq_lens, query_lens, num_kv_heads=2, group=3, head_size=64, num_pad_tokens=1)
    outs = [
        case.run(partial(op, singles=False), device=device)
        for op, device in ((attention, DEVICE), (reference_attention.attention, "cpu"))
    ]
    singles = [int(case.query_start[row]) for row, count in enumerate(query_lens) if count == 1]
    others = [token for token in range(len(case.q)) if token not in singles]
    expected = case.expected().float()
    assert not torch.equal(outs[0][singles], expected[singles])
    for out in outs:
        torch.testing.assert_close(out[others], expected[others], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("num_programs", [1, 4])
@pytest.mark.parametrize(("seq_lens", "query_lens"), SINGLE_ROWS)
def test_ragged_rows_of_one_token_are_attended_to_in_tiles(
    seq_lens: list[int], query_lens: list[int], num_programs: int
) -> None:
    """Beside prompts, before, between and behind them; rows of one tile and of several; one whose only query sees
    nothing; padding of one token, which is no row's. The counters are zero again, so the same call repeats."""
    case = make_case(seq_lens, query_lens, num_kv_heads=2, group=3, head_size=64, num_pad_tokens=1)
    op = with_tiles(case, num_programs)
    for _ in range(2):
        out = assert_matches_reference(case, op=op)
        assert not out[-1].any()


@pytest.mark.skipif(DEVICE == "cuda", reason="what a launcher does that cannot be prepared; tests/gpu has the other")
def test_without_a_launcher_that_is_known_prepared_calls_run_as_they_are() -> None:
    case = make_case([70, 300, 5, 9], [70, 1, 3, 1], num_kv_heads=2, group=3, head_size=64, num_pad_tokens=1)
    pool = case.pool.clone()
    k_cache, v_cache = pool[:, 0], pool[:, 1]
    slots = torch.full((case.q.shape[0],), -1, dtype=torch.int32)
    for token, row in ((70, 1), (74, 3)):
        position = case.seq_lens[row] - 1
        block = case.block_table[int(case.row_slot[row]), position // 16]
        slots[token] = block * 16 + position % 16
    k, v = k_cache.new_zeros(2, case.q.shape[0], 2, 64)
    for token, row in ((70, 1), (74, 3)):
        k[token], v[token] = case.keys[row][-1], case.values[row][-1]
    written = slots[[70, 74]].long()
    for cache in (k_cache, v_cache):
        cache[written // 16, written % 16] = float("nan")
    tiles, (counters, partials) = case.tiles(0, 32, 3), case.workspace(3)
    out = torch.full_like(case.q, float("nan"))
    rows = (case.block_table, case.row_slot, case.query_start, case.seq_lens)
    over = (case.q, k_cache, v_cache, tiles, case.query_start, case.scale, 0, 4, out, counters, partials)
    calls = (
        kv_write_call(k, v, k_cache, v_cache, slots, None),
        prefill_call(case.q, k_cache, v_cache, *rows, case.scale, 4, out, None, singles=False),
        attend_tiles_call(*over, None),
    )
    assert not any(call.can_be_prepared for call in calls)
    run = prepared_ragged(*calls, case.q.device, lambda: pytest.fail("the grid is the call's own"))
    assert out.isnan().all()
    run()
    expected = case.run(reference_attention.attention)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    out.fill_(float("nan"))
    prepared_decode(calls[1], calls[2], device=case.q.device)()
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    out.fill_(float("nan"))
    for cache in (k_cache, v_cache):
        cache[written // 16, written % 16] = float("nan")
    prepared_around(calls[0], calls[1].__call__, calls[2], case.q.device)()
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_a_length_beyond_the_table_reads_only_the_table() -> None:
    case = make_case([32, 16, 30], [1] * 3, num_kv_heads=1, group=2, head_size=64)
    for row in range(3):
        table = case.block_table[int(case.row_slot[row])]
        table[table > case.pool.shape[0]] = int(table[0])
    case.pool.nan_to_num_(nan=0.5)
    case.seq_lens[:3] = torch.tensor([100, 49, 200], dtype=torch.int32)
    assert_matches_reference(case, query_len=1)
    assert_matches_reference(case)
    assert_matches_reference(case, op=with_tiles(case, 4))


def test_strides_come_from_the_tensors() -> None:
    """Three key heads, and a cache that is one half of a pool: its block stride is twice what its shape suggests."""
    case = make_case([21, 4, 10], [1] * 3, num_kv_heads=3, group=1, head_size=64)
    assert case.pool[:, 0].stride(0) == 2 * case.pool[0, 0].numel()
    assert_matches_reference(case, query_len=1, num_splits=2)
