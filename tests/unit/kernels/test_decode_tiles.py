"""Attention over a list of tiles: the list itself, then specification and kernel against an independent answer (on the
GPU where there is one, else in the interpreter), then what the list's sizes follow from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_case import BLOCK_SIZE, DEVICE, OUT_OF_RANGE, AttentionCase, make_case
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ostinato.config import MAX_NUM_SEQS
from ostinato.kernels import decode_tiles, ops, reference_attention, reference_tiles
from ostinato.kernels.decode_tiles import FIRST_TILE, LAST_TILE, TILE_ROWS, VALID_SHIFT, tile_unit
from ostinato.kernels.kv_formats import FP8_E4M3, decode, encode
from ostinato.kernels.splits import choose_num_splits

pytestmark = [  # both are the interpreter's own
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning"),
]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# The interpreter gets bfloat16 arithmetic wrong.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
WHERE = ["torch", "triton"]
LAYERS = 3  # what lies between a block's cells and the next one's
FP8 = FP8_E4M3.dtype
SCALES = torch.tensor([[0.5, 0.03, 1.7], [2.0, 0.011, 0.4]])


def op(where: str, name: str) -> tuple[Callable[..., None], str]:
    """An implementation, and the device it runs on."""
    if where == "torch":
        found: Callable[..., None] = getattr(reference_tiles, name)
        return found, "cpu"
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported without its interpreter and there is no GPU")
    found = getattr(__import__("ostinato.kernels.triton_decode_tiles", fromlist=[name]), name)
    return found, DEVICE


# -- the list ----------------------------------------------------------------------------------------------------------


def plan(
    where: str, seq_lens: Sequence[int], counts: Sequence[int] | None, table: Tensor, tile: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Starts, info and cells; `counts`: tokens of each row of a ragged step."""
    planner, device = op(where, "plan_tiles")
    num_rows, unit = len(seq_lens), tile_unit(tile, block_size)
    most = sum(-(-max(seq_len, 1) // tile) for seq_len in seq_lens) + 1
    starts, info, cells = (
        torch.full(shape, OUT_OF_RANGE, dtype=torch.int32, device=device)
        for shape in ((num_rows + 2,), (most, 2), (most, tile // unit))
    )
    edges = torch.tensor([0, *(counts or [1] * num_rows)]).cumsum(0).int()
    query_start = torch.cat([edges, edges.new_full((1,), OUT_OF_RANGE)])
    lens = torch.tensor([*seq_lens, OUT_OF_RANGE], dtype=torch.int32)
    slots = torch.arange(num_rows).flip(0).int()
    planner(
        lens.to(device), query_start.to(device), table.to(device), slots.to(device), int(counts is None), num_rows,
        block_size, LAYERS * block_size, tile, starts, info, cells,
    )  # fmt: skip
    return starts.cpu(), info.cpu(), cells.cpu()


def tables(num_rows: int, width: int) -> Tensor:
    """[R, W] of distinct blocks, a view of a wider table."""
    return torch.arange(num_rows * (width + 2), dtype=torch.int32).view(num_rows, -1)[:, 1 : width + 1]


@given(
    st.lists(st.tuples(st.integers(0, 130), st.integers(0, 3)), min_size=1, max_size=12),
    st.booleans(),
    st.sampled_from([(16, 16), (32, 16), (64, 16), (16, 32), (64, 8)]),
)
def test_the_list_has_every_position_once_and_in_order(
    rows: list[tuple[int, int]], ragged: bool, sizes: tuple[int, int]
) -> None:
    (seq_lens, counts), (tile, block_size) = map(list, zip(*rows, strict=True)), sizes
    table = tables(len(rows), -(-130 // block_size))
    starts, info, cells = plan("torch", seq_lens, counts if ragged else None, table, tile, block_size)
    unit, at, token = tile_unit(tile, block_size), 0, 0
    for row, (seq_len, count) in enumerate(rows):
        assert starts[row] == at
        listed: list[int] = []
        if not ragged or count == 1:
            num_tiles = max(-(-seq_len // tile), 1)
            for index in range(num_tiles):
                word, of_token = info[at].tolist()
                assert (word % TILE_ROWS, of_token) == (row, token)
                assert bool(word & FIRST_TILE) == (index == 0) and bool(word & LAST_TILE) == (index == num_tiles - 1)
                runs = [cell + place for cell in cells[at].tolist() for place in range(unit)]
                listed += runs[: word >> VALID_SHIFT & 0xFF]
                at += 1
            blocks = table[len(rows) - 1 - row].tolist()
            stride = LAYERS * block_size
            assert listed == [blocks[p // block_size] * stride + p % block_size for p in range(seq_len)]
        token += count if ragged else 1
    assert starts[len(rows)] == at and starts[len(rows) + 1] == OUT_OF_RANGE
    assert info[at:].eq(OUT_OF_RANGE).all() and cells[at:].eq(OUT_OF_RANGE).all()


@pytest.mark.parametrize(("tile", "block_size"), [(16, 16), (64, 16), (16, 32)])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_the_kernel_lists_the_same(num_rows: int, ragged: bool, tile: int, block_size: int) -> None:
    """Lengths of more tiles than it lists at a time, and beyond what the table has room for, too."""
    generator = torch.Generator().manual_seed(num_rows)
    most = 1500 if num_rows < 40 else 200
    seq_lens = torch.randint(0, most, (num_rows,), generator=generator).tolist()
    counts = torch.randint(0, 3, (num_rows,), generator=generator).tolist() if ragged else None
    args = (seq_lens, counts, tables(num_rows, most * 3 // 4 // block_size), tile, block_size)
    for ours, theirs in zip(plan("triton", *args), plan("torch", *args), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("where", WHERE)
def test_a_step_without_rows_has_no_tiles(where: str) -> None:
    starts, _, _ = plan(where, [], None, tables(1, 1), 16, 16)
    assert starts[0] == 0


# -- attention over it -------------------------------------------------------------------------------------------------


def attend(
    where: str,
    case: AttentionCase,
    num_programs: int,
    tile: int = 16,
    query_len: int | None = None,
    workspace: tuple[Tensor, Tensor] | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """The output, from an `out` that is NaN beforehand, so that what is not written stays NaN."""
    call, device = op(where, "attend_tiles")
    query_len = int(set(case.query_lens) == {1}) if query_len is None else query_len
    tiles = case.tiles(query_len, tile, num_programs, device)
    counters, partials = workspace or case.workspace(num_programs, device)
    wide = torch.full((*case.q.shape[:2], case.q.shape[2] + 16), float("nan"), dtype=case.q.dtype, device=device)
    out, pool = wide[..., : case.q.shape[2]], case.pool.to(device)
    call(
        case.q.to(device), pool[:, 0], pool[:, 1], *tiles[:3], case.query_start.to(device), case.scale, query_len,
        len(case.query_lens), tile, num_programs, out, counters, partials,
        None if kv_scales is None else kv_scales.to(device),
    )  # fmt: skip
    assert wide[..., case.q.shape[2] :].isnan().all(), "wrote outside `out`"
    assert not counters.any(), "the next call would find counts left over"
    return out.cpu()


def tokens_of(case: AttentionCase) -> tuple[list[int], list[int]]:
    """Those of rows of one token, and all others."""
    singles = [int(case.query_start[row]) for row, count in enumerate(case.query_lens) if count == 1]
    return singles, [token for token in range(len(case.q)) if token not in singles]


def assert_right(where: str, case: AttentionCase, num_programs: int, tile: int = 16, **rest: Any) -> Tensor:
    out = attend(where, case, num_programs, tile, **rest)
    singles, others = tokens_of(case)
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out[singles].double(), case.expected()[singles], atol=tolerance, rtol=tolerance)
    assert out[others].isnan().all(), "wrote to tokens of no row of one token"
    return out


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_size", "group"), [(64, 3), (80, 1), (96, 4), (128, 16), (256, 2)])
def test_every_head_shape(where: str, head_size: int, group: int, dtype: torch.dtype) -> None:
    case = make_case([70, 0, 17], [1] * 3, num_kv_heads=1, group=group, head_size=head_size, dtype=dtype)
    assert_right(where, case, 3, tile=32)


ROWS = [
    ([1], [1]),
    ([1, 1, 1], [1, 1, 1]),
    ([70, 33, 2, 0, 5], [1, 1, 1, 1, 1]),
    ([16, 32, 48, 64], [1, 1, 1, 1]),
    ([0, 0, 0], [1, 1, 1]),
    ([70, 33, 2, 0, 5], [1, 33, 1, 0, 1]),
    ([0, 70, 9, 17], [1, 3, 1, 17]),
    ([20, 130, 64], [20, 1, 1]),
    ([7, 5], [7, 2]),
]


@pytest.mark.parametrize("num_programs", [1, 2, 3, 40])
@pytest.mark.parametrize(("seq_lens", "query_lens"), ROWS)
def test_rows_of_any_length(seq_lens: list[int], query_lens: list[int], num_programs: int) -> None:
    """On one program, which merges nothing; on some, whose shares end inside rows and at their borders; on more than
    there are tiles. Rows without positions get zeros, rows of several tokens and padding stay as they are."""
    case = make_case(seq_lens, query_lens, num_kv_heads=2, group=3, head_size=64, num_pad_tokens=1)
    case = replace(case, q=case.q[: sum(query_lens) + (set(query_lens) != {1})])
    out = assert_right("triton", case, num_programs)
    assert_right("torch", case, num_programs)
    for row, (seq_len, count) in enumerate(zip(seq_lens, query_lens, strict=True)):
        if seq_len == 0 and count == 1:
            assert not out[int(case.query_start[row])].any()


@pytest.mark.parametrize("num_programs", range(1, 15))
def test_every_way_to_divide_a_list(num_programs: int) -> None:
    """Rows of 1, 5, 3, 1 and 4 tiles: rows within a share, over two shares and over many, shares of unlike size."""
    case = make_case([3, 70, 48, 16, 61], [1] * 5, num_kv_heads=1, group=2, head_size=64)
    assert_right("triton", case, num_programs)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("query_lens", [(1, 1, 1), (1, 2, 1)])
def test_a_row_over_many_programs(where: str, query_lens: tuple[int, ...]) -> None:
    """More parts than are merged at a time, of a row that begins in the middle of a share and one that does not."""
    case = make_case([300, 20, 230], query_lens, num_kv_heads=2, group=3, head_size=64)
    for num_programs in (12, 35):
        assert_right(where, case, num_programs)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("tile", [4, 16, 32, 64])
def test_tiles_smaller_and_larger_than_a_block(where: str, tile: int) -> None:
    if where == "triton" and tile < 16 and DEVICE == "cuda":
        pytest.skip("a matrix product on tensor cores has at least 16 keys")
    case = make_case([70, 0, 4, 33], [1] * 4, num_kv_heads=2, group=2, head_size=64)
    assert_right(where, case, 3, tile)


@pytest.mark.parametrize("tile", [16, 64])
def test_a_length_beyond_the_table_reads_only_the_table(tile: int) -> None:
    case = make_case([32, 16, 30], [1] * 3, num_kv_heads=1, group=2, head_size=64)
    for row in range(3):
        table = case.block_table[int(case.row_slot[row])]
        table[table > case.pool.shape[0]] = int(table[0])
    case.pool.nan_to_num_(nan=0.5)
    case.seq_lens[:3] = torch.tensor([100, 49, 200], dtype=torch.int32)
    expected = case.run(reference_attention.attention, 1, device="cpu")
    for where in WHERE:
        torch.testing.assert_close(attend(where, case, 4, tile), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("num_programs", [1, 3])
@pytest.mark.parametrize("bad", range(4))
def test_a_nan_of_one_row_stays_with_it(where: str, num_programs: int, bad: int) -> None:
    """Whether it is in a key or in a value, in whichever tile: the others have the same bits as without it."""
    case = make_case([40, 3, 70, 33], [1] * 4, num_kv_heads=2, group=2, head_size=64)
    good = attend(where, case, num_programs)
    assert good.isfinite().all()
    others = [row for row in range(4) if row != bad]
    last = int(case.seq_lens[bad]) - 1
    for kind, position in ((0, 0), (1, 0), (0, last), (1, last)):
        pool = case.pool.clone()
        block = int(case.block_table[int(case.row_slot[bad]), position // BLOCK_SIZE])
        pool[block, kind, position % BLOCK_SIZE] = float("nan")
        out = attend(where, replace(case, pool=pool), num_programs)
        assert out[bad].isnan().any()
        assert torch.equal(out[others], good[others])


def test_one_workspace_serves_one_call_after_another() -> None:
    """As graph replays do, also with rows of other lengths in between: same bits, whatever is left in it."""
    first = make_case([70, 40, 1], [1] * 3, num_kv_heads=2, group=2, head_size=64)
    second = make_case([3, 0, 90], [1] * 3, num_kv_heads=2, group=2, head_size=64, seed=1)
    workspace = first.workspace(5)
    outs = [assert_right("triton", case, 5, workspace=workspace) for case in (first, second, first, second)]
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])


def test_rows_of_one_token_may_be_said_to_be_ragged() -> None:
    case = make_case([70, 0, 33], [1] * 3, num_kv_heads=2, group=2, head_size=64)
    assert torch.equal(attend("triton", case, 4, query_len=0), attend("triton", case, 4, query_len=1))


def test_strides_come_from_the_tensors() -> None:
    case = make_case([21, 4, 70], [1] * 3, num_kv_heads=3, group=1, head_size=64)
    assert case.pool[:, 0].stride(0) == 2 * case.pool[0, 0].numel() and not case.q.is_contiguous()
    assert_right("triton", case, 4)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_replays_of_a_graph_agree() -> None:
    """List, rows that fill a device and their merges at once: every replay has the same bits."""
    lens = [1000, 0, 1, 517, 64, 2049, 129, 33] * 8
    case = make_case(lens, [1] * len(lens), num_kv_heads=8, group=4, head_size=128, dtype=torch.bfloat16)
    planner, attender = op("triton", "plan_tiles")[0], op("triton", "attend_tiles")[0]
    tiles = case.tiles(1, 64, 33)
    counters, partials = case.workspace(33)
    live = [tensor.to(DEVICE) for tensor in (case.seq_lens, case.query_start, case.block_table, case.row_slot)]
    q, pool = case.q.to(DEVICE), case.pool.to(DEVICE)
    out = torch.empty_like(q)

    def step() -> None:
        planner(*live, 1, len(lens), BLOCK_SIZE, 2 * BLOCK_SIZE, 64, *tiles[:3])
        out.fill_(float("nan"))
        for _ in range(3):
            attender(
                q, pool[:, 0], pool[:, 1], *tiles[:3], live[1], case.scale, 1, len(lens), 64, 33, out, counters,
                partials,
            )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    first = None
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out.cpu().double(), case.expected(), atol=2e-2, rtol=2e-2)
        first = out.clone() if first is None else first
        assert torch.equal(out, first) and not counters.any()


# -- caches with scales ------------------------------------------------------------------------------------------------


def stored(pool: Tensor) -> Tensor:
    """In FP8 under SCALES."""
    return torch.stack([encode(pool[:, kind], SCALES[kind][:, None], FP8) for kind in (0, 1)], dim=1)


def read(case: AttentionCase, pool: Tensor) -> AttentionCase:
    """The case whose keys and values are what a cache of FP8 holds, read back."""
    wide = torch.stack([decode(pool[:, kind], SCALES[kind][:, None]) for kind in (0, 1)], dim=1)
    known = []
    for row, keys in enumerate(case.keys):
        blocks = case.block_table[int(case.row_slot[row]), : -(-len(keys) // BLOCK_SIZE)].long()
        known.append(wide[blocks].transpose(0, 1).flatten(1, 2)[:, : len(keys)])
    return replace(case, keys=tuple(kv[0] for kv in known), values=tuple(kv[1] for kv in known))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("query_lens", [(1, 1, 1, 1), (1, 5, 1, 1)])
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "float"])
def test_attention_reads_under_scales(where: str, query_lens: tuple[int, ...], fp8: bool) -> None:
    """A cache in FP8, and one in float32 whose scales mean the same; written out whole, in parts, and merged."""
    case = make_case([70, 20, 0, 33], query_lens, num_kv_heads=3, group=2, head_size=64)
    # the interpreter has no FP8 NaN
    pool = stored(case.pool.nan_to_num(0.0) if where == "triton" else case.pool)
    case = replace(read(case, pool), pool=pool if fp8 else pool.float())
    for num_programs in (1, 4):
        out = attend(where, case, num_programs, kv_scales=SCALES)
        singles, others = tokens_of(case)
        torch.testing.assert_close(out[singles].double(), case.expected()[singles], atol=3e-5, rtol=3e-5)
        assert out[others].isnan().all()


# -- how large tiles are, and how many programs ------------------------------------------------------------------------


@pytest.mark.parametrize(("element_size", "cache_element_size"), [(2, 2), (2, 1), (4, 4), (4, 1)])
@pytest.mark.parametrize("head_size", [16, 64, 80, 96, 128, 256, 512])
def test_a_tile_fits_its_entry_and_a_matrix_product(head_size: int, element_size: int, cache_element_size: int) -> None:
    tile = decode_tiles.tile_config(head_size, element_size, cache_element_size).tile
    assert 16 <= tile < FIRST_TILE >> VALID_SHIFT and tile & (tile - 1) == 0
    assert tile * head_size * cache_element_size <= 16 * 1024 or tile == 16 or cache_element_size == 1
    assert decode_tiles.smallest_tile(head_size, element_size) <= tile
    for block_size in (8, 16, 32, 128):
        unit = tile_unit(tile, block_size)
        assert tile % unit == 0 == block_size % unit


def test_keys_and_values_have_the_same_strides() -> None:
    case = make_case([21, 4], [1] * 2, num_kv_heads=1, group=1, head_size=64)
    call, device = op("triton", "attend_tiles")
    tiles, pool = case.tiles(1, 16, 2, device), case.pool.to(device)
    with pytest.raises(ValueError, match="same strides"):
        call(
            case.q.to(device), pool[:, 0], pool[:, 1].contiguous(), *tiles[:3], case.query_start.to(device), 1.0, 1, 2,
            16, 2, case.q.to(device).clone(), *case.workspace(2, device),
        )  # fmt: skip


def test_a_list_is_for_one_cache() -> None:
    case = make_case([21, 4], [1] * 2, num_kv_heads=1, group=1, head_size=64)
    keys, values = case.pool[:, 0].contiguous(), case.pool[:, 1].contiguous()
    with pytest.raises(ValueError, match="blocks of 32 cells, the cache has 16"):
        ops.attend_tiles(
            case.q, keys, values, case.tiles(1, 16, 2, "cpu"), case.query_start, 1.0, 1, 2, case.q.clone(),
            *case.workspace(2, "cpu"),
        )  # fmt: skip


def test_a_block_is_a_whole_number_of_cells() -> None:
    pool = torch.zeros(3, 2, 4, 5, 6)
    assert decode_tiles.block_cells(pool[:, 1]) == 8
    with pytest.raises(ValueError, match="no multiple"):
        decode_tiles.block_cells(pool.as_strided((3, 4, 5, 6), (100, 30, 6, 1)))


@given(
    st.integers(1, 200), st.sampled_from([1, 2, 3, 5, 8, 16, 32, 300]), st.integers(1, 16),
    st.sampled_from([64, 128, 256]), st.sampled_from([1, 2]),
)  # fmt: skip
def test_the_workspace_is_enough_for_every_step(
    num_sms: int, num_kv_heads: int, group: int, head_size: int, cache_element_size: int
) -> None:
    """For tiles, two places a program, and for rows that are split, as many as the steps of any number of rows have."""
    num_heads = num_kv_heads * group
    size = decode_tiles.num_partial_floats(num_heads, num_kv_heads, head_size, num_sms)
    config = decode_tiles.tile_config(head_size, 2, cache_element_size)
    num_programs = decode_tiles.tile_programs(config, num_kv_heads, num_sms)
    assert num_programs >= 1 and num_programs * num_kv_heads <= max(config.programs_per_sm * num_sms, num_kv_heads)
    assert 2 * num_programs * num_heads * (head_size + 1) <= size
    for num_rows in range(1, 2 * num_sms // num_kv_heads + 2):
        num_splits = choose_num_splits(num_rows, num_kv_heads, 100_000, num_sms)
        assert num_splits == 1 or num_rows * num_splits * num_heads * (head_size + 1) <= size


def test_an_entry_has_room_for_every_row_that_may_run() -> None:
    assert MAX_NUM_SEQS <= TILE_ROWS
