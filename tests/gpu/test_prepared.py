"""What runs between two graphs: launches that were prepared, against the ops that they stand for, bit for bit.

Kernels are imported where they are used: collecting this must not import Triton before other tests turn its
interpreter on.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ostinato.kernels import ops
from tests.gpu.op_cases import DTYPES, AttentionCase, B, attention_case, normal

pytestmark = pytest.mark.gpu

LENGTHS = [(70, 33, 900, 4, 5), (1, 33, 1, 4, 1)]  # known tokens, those of the step; rows without any stand behind
PADDED_ROWS = 3


def workspace(case: AttentionCase, num_parts: int) -> tuple[Tensor, Tensor]:
    """Counters, and partial results that are NaN beforehand."""
    from ostinato.kernels.triton_decode_fused import num_partial_floats

    size = num_partial_floats(num_parts, *case.q.shape[1:])
    counters = torch.zeros(case.num_rows * case.k_cache.shape[2], dtype=torch.int32, device=case.q.device)
    return counters, torch.full((size,), float("nan"), device=case.q.device)


def slots_of(case: AttentionCase) -> Tensor:
    """The cell of each of the step's tokens, as its row's table gives it."""
    slots = torch.full((case.q.shape[0],), -1, dtype=torch.int32)
    for row in range(case.num_rows):
        start, end = int(case.query_start[row]), int(case.query_start[row + 1])
        for token in range(start, end):
            position = int(case.seq_lens[row]) - (end - token)
            block = int(case.block_table[int(case.row_slot[row]), position // B])
            slots[token] = block * B + position % B
    return slots.to(case.q.device)


@pytest.mark.parametrize("num_extra", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged(device: torch.device, dtype: torch.dtype, num_extra: int) -> None:
    """Over the live rows alone, however many the key has room for; and again over other data at the same addresses."""
    from ostinato.kernels.triton_attention import prepared_ragged
    from ostinato.kernels.triton_attention_prefill import prefill_call
    from ostinato.kernels.triton_decode_fused import single_token_call
    from ostinato.kernels.triton_kv_write import kv_write_call

    seq_lens, query_lens = ((*lens, *[0] * PADDED_ROWS) for lens in LENGTHS)
    case = attention_case(
        dtype, seq_lens, query_lens=query_lens, num_heads=8, num_kv_heads=2, head_size=64, num_padded_tokens=1
    ).on(device)
    k, v = (normal(case.q.shape[0], 2, 64, seed=seed, dtype=dtype).to(device) for seed in (7, 8))
    slots, out = slots_of(case), torch.full_like(case.q, float("nan"))
    counters, partials = workspace(case, case.num_rows + num_extra)
    parts = torch.full((1 + case.num_rows + num_extra,), -1, dtype=torch.int32, device=device)
    rows = (case.block_table, case.row_slot, case.query_start, case.seq_lens)
    over = (case.q, case.k_cache, case.v_cache, *rows, case.scale, case.num_rows, out)
    run = prepared_ragged(
        kv_write_call(k, v, case.k_cache, case.v_cache, slots, None),
        single_token_call(*over, counters, parts, partials, None),
        prefill_call(*over, None, singles=False),
        device,
        lambda: len(LENGTHS[0]),
    )
    for repeat in range(2):
        if repeat:
            k.neg_()
            case.q.mul_(0.5)
            case.seq_lens[2] -= 1  # a row that has become shorter, without its newest token
        ops.plan_parts(case.seq_lens, case.query_start, 0, case.num_rows, 2, 8, parts)
        expected = torch.full_like(out, float("nan"))
        caches = case.k_cache.clone(), case.v_cache.clone()
        ops.kv_write(k, v, *caches, slots)
        ops.attention(
            case.q, *caches, case.block_table, case.row_slot, case.query_start, case.seq_lens, case.scale, 0,
            case.num_rows, 1, expected, None, counters, parts, partials,
        )  # fmt: skip
        run()
        assert torch.equal(out, expected) and bool(out.isfinite().all())
        for ours, theirs in zip((case.k_cache, case.v_cache), caches, strict=True):
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
        assert not counters.any()


@pytest.mark.parametrize(("num_splits", "listed"), [(1, False), (4, False), (1, True)])
def test_decode_on_the_stream_that_is_current(device: torch.device, num_splits: int, listed: bool) -> None:
    from ostinato.kernels.triton_attention import prepared_decode
    from ostinato.kernels.triton_decode_fused import decode_call

    case = attention_case(
        torch.bfloat16, [70, 1, 900], query_len=1, num_heads=8, num_kv_heads=2, head_size=128
    ).on(device)  # fmt: skip
    k, v = (normal(3, 2, 128, seed=seed, dtype=torch.bfloat16).to(device) for seed in (7, 8))
    positions, cos_sin = case.seq_lens - 1, normal(1024, 128, seed=9).to(device)
    norms = [normal(128, seed=seed, dtype=torch.bfloat16).to(device) for seed in (10, 11)]
    counters, partials = workspace(case, 3 * num_splits + 4)
    parts = torch.full((1 + 3 + 4,), -1, dtype=torch.int32, device=device) if listed else None
    if parts is not None:
        ops.plan_parts(case.seq_lens, case.query_start, 1, 3, 2, 8, parts)
        assert int((parts >= 1 << 16).sum()) > 0
    before = (positions, cos_sin, *norms, 1e-5, slots_of(case))
    behind = (case.block_table, case.row_slot, case.seq_lens, case.scale, 3, num_splits)
    expected, out = torch.full_like(case.q, float("nan")), torch.full_like(case.q, float("nan"))
    caches = case.k_cache.clone(), case.v_cache.clone()
    ops.decode_attention(case.q, k, v, *before, *caches, *behind, expected, counters, True, None, parts, partials)
    call = decode_call(
        case.q, k, v, *before, case.k_cache, case.v_cache, *behind, out, counters, True, None, parts, partials
    )  # fmt: skip
    run = prepared_decode(call, device)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        run()
        done = torch.cuda.Event()
        done.record()
    assert not done.query(), "launched on another stream than the current one"
    done.synchronize()
    assert torch.equal(out, expected)


def test_tensors_of_a_prepared_call_live_as_long(device: torch.device) -> None:
    from ostinato.kernels.triton_kv_write import kv_write_call
    from ostinato.kernels.triton_launch import PreparedCall

    k = torch.ones(1, 2, 64, dtype=torch.bfloat16, device=device)
    cache, slots = torch.zeros(2, B, 2, 64, dtype=torch.bfloat16, device=device), torch.zeros(1, dtype=torch.int32)
    call = PreparedCall(kv_write_call(k, k.clone(), cache, torch.zeros_like(cache), slots.to(device), None))
    kept, address = sum(1 for tensor in call._tensors if tensor.is_cuda), k.data_ptr()
    del k
    assert kept == 5
    assert torch.empty(1, 2, 64, dtype=torch.bfloat16, device=device).data_ptr() != address
    call.launch(torch.cuda.current_stream().cuda_stream, *call.grid)
    torch.cuda.synchronize()
    assert bool((cache[0, 0] == 1).all()) and int((cache != 0).sum()) == 2 * 64
