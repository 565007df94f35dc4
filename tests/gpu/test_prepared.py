"""What runs between two graphs: launches that were prepared, against the ops that they stand for, bit for bit.

Kernels are imported where they are used: collecting this must not import Triton before other tests turn its
interpreter on.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ostinato.kernels import ops
from ostinato.kernels.decode_tiles import block_cells, tile_config, tile_unit
from tests.gpu.op_cases import DTYPES, AttentionCase, B, attention_case, normal

pytestmark = pytest.mark.gpu

LENGTHS = [(70, 33, 900, 4, 5), (1, 33, 1, 4, 1)]  # known tokens, those of the step; rows without any stand behind
PADDED_ROWS = 3


def workspace(case: AttentionCase, num_places: int) -> tuple[Tensor, Tensor]:
    """Counters, and places of partial results that are NaN beforehand."""
    num_heads, head_size = case.q.shape[1:]
    counters = torch.zeros(case.num_rows * case.k_cache.shape[2], dtype=torch.int32, device=case.q.device)
    return counters, torch.full((num_places * num_heads * (head_size + 1),), float("nan"), device=case.q.device)


def tiles_of(case: AttentionCase, num_programs: int) -> ops.DecodeTiles:
    """Room for the list, not yet made."""
    tile = tile_config(case.q.shape[2], case.q.element_size(), case.k_cache.element_size()).tile
    num_tiles = case.num_rows * -(-case.block_table.shape[1] * B // tile)
    starts = torch.zeros(case.num_rows + 1, dtype=torch.int32, device=case.q.device)
    info, cells = (starts.new_zeros(num_tiles, count) for count in (2, tile // tile_unit(tile, B)))
    return ops.DecodeTiles(starts, info, cells, tile, num_programs, block_cells(case.k_cache))


def own_caches(case: AttentionCase) -> tuple[Tensor, Tensor]:
    """Copies of the same strides, which the list of tiles is for."""
    copy = case.on(case.q.device)
    return copy.k_cache, copy.v_cache


def plan(case: AttentionCase, tiles: ops.DecodeTiles) -> None:
    rows = (case.seq_lens, case.query_start, case.block_table, case.row_slot)
    ops.plan_tiles(*rows, case.query_len, case.num_rows, B, tiles)


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


@pytest.mark.parametrize("num_programs", [1, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged(device: torch.device, dtype: torch.dtype, num_programs: int) -> None:
    """Over the live rows alone, however many the key has room for; and again over other data at the same addresses."""
    from ostinato.kernels.triton_attention import prepared_ragged
    from ostinato.kernels.triton_attention_prefill import prefill_call
    from ostinato.kernels.triton_decode_tiles import attend_tiles_call
    from ostinato.kernels.triton_kv_write import kv_write_call

    seq_lens, query_lens = ((*lens, *[0] * PADDED_ROWS) for lens in LENGTHS)
    case = attention_case(
        dtype, seq_lens, query_lens=query_lens, num_heads=8, num_kv_heads=2, head_size=64, num_padded_tokens=1
    ).on(device)
    k, v = (normal(case.q.shape[0], 2, 64, seed=seed, dtype=dtype).to(device) for seed in (7, 8))
    slots, out = slots_of(case), torch.full_like(case.q, float("nan"))
    (counters, partials), tiles = workspace(case, 2 * num_programs), tiles_of(case, num_programs)
    rows = (case.block_table, case.row_slot, case.query_start, case.seq_lens)
    over = (tiles, case.query_start, case.scale, 0, case.num_rows)
    run = prepared_ragged(
        kv_write_call(k, v, case.k_cache, case.v_cache, slots, None),
        prefill_call(case.q, case.k_cache, case.v_cache, *rows, case.scale, case.num_rows, out, None, singles=False),
        attend_tiles_call(case.q, case.k_cache, case.v_cache, *over, out, counters, partials, None),
        device,
        lambda: len(LENGTHS[0]),
    )
    for repeat in range(2):
        if repeat:
            k.neg_()
            case.q.mul_(0.5)
            case.seq_lens[2] -= 1  # a row that has become shorter, without its newest token
        plan(case, tiles)
        expected = torch.full_like(out, float("nan"))
        caches = own_caches(case)
        ops.kv_write(k, v, *caches, slots)
        ops.attention(case.q, *caches, *rows, case.scale, 0, case.num_rows, 1, expected, None, False)
        ops.attend_tiles(case.q, *caches, *over, expected, counters, partials)
        run()
        assert torch.equal(out, expected) and bool(out.isfinite().all())
        for ours, theirs in zip((case.k_cache, case.v_cache), caches, strict=True):
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
        assert not counters.any()


@pytest.mark.parametrize(("num_splits", "tiled"), [(1, False), (4, False), (1, True)])
def test_decode_on_the_stream_that_is_current(device: torch.device, num_splits: int, tiled: bool) -> None:
    from ostinato.kernels.triton_attention import prepared_decode
    from ostinato.kernels.triton_decode_fused import decode_call
    from ostinato.kernels.triton_decode_tiles import attend_tiles_call
    from ostinato.kernels.triton_rope_write import rope_write_call

    case = attention_case(
        torch.bfloat16, [70, 1, 900], query_len=1, num_heads=8, num_kv_heads=2, head_size=128
    ).on(device)  # fmt: skip
    k, v = (normal(3, 2, 128, seed=seed, dtype=torch.bfloat16).to(device) for seed in (7, 8))
    positions, cos_sin = case.seq_lens - 1, normal(1024, 128, seed=9).to(device)
    norms = [normal(128, seed=seed, dtype=torch.bfloat16).to(device) for seed in (10, 11)]
    counters, partials = workspace(case, 3 * num_splits + 4)
    before = (positions, cos_sin, *norms, 1e-5, slots_of(case))
    expected, out = torch.full_like(case.q, float("nan")), torch.full_like(case.q, float("nan"))
    own, caches = (case.k_cache, case.v_cache), own_caches(case)
    if tiled:
        tiles, query = tiles_of(case, 3), case.q.clone()
        plan(case, tiles)
        over = (tiles, case.query_start, case.scale, 1, 3)
        ops.rope_write(query, k, v, *before, *caches)
        ops.attend_tiles(query, *caches, *over, expected, counters, partials)
        calls = [
            rope_write_call(case.q, k, v, *before, *own, None),
            attend_tiles_call(case.q, *own, *over, out, counters, partials, None),
        ]
    else:
        behind = (case.block_table, case.row_slot, case.seq_lens, case.scale, 3, num_splits)
        ops.decode_attention(case.q, k, v, *before, *caches, *behind, expected, counters, True, None, partials)
        calls = [decode_call(case.q, k, v, *before, *own, *behind, out, counters, True, None, partials)]
    run = prepared_decode(*calls, device=device)
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
