"""FlashAttention without it: the rows written down for it, the specification, and what the package is asked for.

The package's op is stood in for by one of the same schema, which refuses what the package refuses and computes what it
says it does; what it really does is for tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from attention_case import BLOCK_SIZE, DEVICE, OUT_OF_RANGE, AttentionCase, make_case
from torch import Tensor

from ostinato.kernels import flash_attention, ops, reference_attention, reference_flash
from ostinato.kernels.flash_attention import MIN_TOKENS, FlashRows, attend, missing, unsupported

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's own

SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0, Tensor? sinks=None) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
"""Of tokenspeed-fa3 3.0.0.post20260810."""
DEFAULTS = {argument.name: argument.default_value for argument in torch._C.parse_schema(SCHEMA).arguments}

ROWS = [
    ([1, 1, 1, 1], [1, 1, 1, 1]),
    ([16, 17, 15], [16, 17, 15]),
    ([0, 0, 70, 0], [0, 0, 70, 0]),
    ([70, 33, 2, 0, 5], [3, 33, 1, 0, 1]),
    ([0, 9], [4, 9]),
    ([3, 50], [5, 43]),
    ([600, 20], [1, 20]),
]


# -- the rows ----------------------------------------------------------------------------------------------------------


def plan_in_torch(*args: Any) -> None:
    reference_flash.plan_flash(*args)


def plan_in_triton(*args: Any) -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported without its interpreter and there is no GPU")
    from ostinato.kernels.triton_flash_rows import plan_flash

    plan_flash(*args)


@pytest.fixture(params=[(plan_in_torch, "cpu"), (plan_in_triton, DEVICE)], ids=["torch", "triton"])
def planner(request: pytest.FixtureRequest) -> tuple[Callable[..., None], str]:
    found: tuple[Callable[..., None], str] = request.param
    return found


def room_for(num_rows: int, width: int, device: str = "cpu", more: int = 0) -> FlashRows:
    """Full of what nobody may use."""
    rows = num_rows + 1 + more
    shapes = ((rows, width), (rows + 1,), (rows,), (rows,))
    return FlashRows(*(torch.full(shape, OUT_OF_RANGE, dtype=torch.int32, device=device) for shape in shapes))


def planned(
    planner: tuple[Callable[..., None], str], case: AttentionCase, singles: bool = True, more: int = 0
) -> FlashRows:
    plan, device = planner
    num_rows, rows = len(case.query_lens), room_for(len(case.query_lens), case.block_table.shape[1], device, more)
    arrays = (case.seq_lens, case.query_start, case.block_table, case.row_slot)
    plan(*(array.to(device) for array in arrays), num_rows, len(case.q), BLOCK_SIZE, singles, *rows)
    return FlashRows(*(tensor.cpu() for tensor in rows))


@pytest.mark.parametrize("singles", [True, False])
@pytest.mark.parametrize("num_pad_tokens", [0, 1, 7])
@pytest.mark.parametrize(("seq_lens", "query_lens"), ROWS)
def test_rows_as_they_are_written_down(
    planner: tuple[Callable[..., None], str],
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    num_pad_tokens: int,
    singles: bool,
) -> None:
    """Only what a row has is copied from its table, and only where it has queries; what lies behind the rows stays."""
    case = make_case(seq_lens, query_lens, num_kv_heads=1, group=1, head_size=16, num_pad_tokens=num_pad_tokens)
    rows, num_rows = planned(planner, case, singles, more=2), len(seq_lens)
    counts = [0 if count == 1 and not singles else count for count in query_lens]
    lengths = [length if count else 0 for length, count in zip(seq_lens, counts, strict=True)]
    edges = torch.tensor([0, *query_lens, num_pad_tokens]).cumsum(0).tolist()
    assert rows.edges.tolist() == [*edges, OUT_OF_RANGE, OUT_OF_RANGE]
    assert rows.queries.tolist() == [*counts, num_pad_tokens, OUT_OF_RANGE, OUT_OF_RANGE]
    assert rows.keys.tolist() == [*lengths, 0, OUT_OF_RANGE, OUT_OF_RANGE]
    expected = torch.full_like(rows.page_table, OUT_OF_RANGE)
    for row, length in enumerate(lengths):
        blocks = -(-length // BLOCK_SIZE)
        expected[row, :blocks] = case.block_table[int(case.row_slot[row]), :blocks]
    assert torch.equal(rows.page_table, expected)
    assert len(rows.queries) == num_rows + 3


def test_a_long_table_is_copied_whole(planner: tuple[Callable[..., None], str]) -> None:
    """Of more blocks than a program copies at a time."""
    width, plan, device = 1100, *planner
    table = torch.randperm(2 * width, generator=torch.Generator().manual_seed(0)).int().view(2, width).to(device)
    rows = room_for(2, width, device)
    arrays = (torch.tensor([width * BLOCK_SIZE, 513 * BLOCK_SIZE + 1]), torch.tensor([0, 9, 11]))
    plan(*(array.int().to(device) for array in arrays), table, torch.tensor([1, 0], dtype=torch.int32).to(device),
         2, 11, BLOCK_SIZE, True, *rows)  # fmt: skip
    assert torch.equal(rows.page_table[0], table[1])
    assert torch.equal(rows.page_table[1, :514], table[0, :514])
    assert bool((rows.page_table[1, 514:] == OUT_OF_RANGE).all())


def test_no_row_is_longer_than_its_table(planner: tuple[Callable[..., None], str]) -> None:
    case = make_case([32, 16], [32, 2], num_kv_heads=1, group=1, head_size=16)
    width = case.block_table.shape[1]
    case.block_table.clamp_(max=1)
    case.seq_lens[0] = 16 * width + 9
    rows = planned(planner, case)
    assert rows.keys.tolist() == [16 * width, 16, 0]
    assert rows.page_table[0].tolist() == case.block_table[int(case.row_slot[0])].tolist()


def test_tokens_of_rows_that_end_behind_the_step_are_cut_off(planner: tuple[Callable[..., None], str]) -> None:
    """As of a recording at fewer tokens than were staged."""
    case = make_case([9, 20], [9, 20], num_kv_heads=1, group=1, head_size=16)
    rows = planned(planner, replace(case, q=case.q[:12]))
    assert rows.edges.tolist() == [0, 9, 12, 12]
    assert rows.queries.tolist() == [9, 3, 0]


# -- the package's op --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StandIn:
    """What the package checks, and what it computes, position by position in double precision."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        given = DEFAULTS | dict(zip(DEFAULTS, args, strict=False))  # torch leaves out the last ones that are defaults
        self.calls.append(given)
        q, k, v, out = (given[name] for name in ("q", "k", "v", "out"))
        edges, used, keys, table = (given[n] for n in ("cu_seqlens_q", "seqused_q", "seqused_k", "page_table"))
        batch, (num_pages, page_size, num_kv_heads, head_size) = len(edges) - 1, k.shape
        assert q.dtype == k.dtype == v.dtype == out.dtype and q.dtype in (torch.float16, torch.bfloat16)
        assert all(tensor.stride(-1) == 1 for tensor in (q, k, v, out, table))
        assert all(tensor.dtype == torch.int32 for tensor in (edges, used, keys, table))
        assert all(tensor.is_contiguous() for tensor in (edges, used, keys))
        assert table.shape[0] == batch and used.shape == keys.shape == (batch,)
        assert v.shape == (num_pages, page_size, num_kv_heads, head_size) and out.shape == q.shape
        assert q.shape[1] % num_kv_heads == 0 and head_size % 8 == 0 and q.shape[2] == head_size
        assert int(edges[-1]) == len(q) and int(used.max()) <= given["max_seqlen_q"]
        group = q.shape[1] // num_kv_heads
        for row in range(batch):
            begin, count, length = int(edges[row]), int(used[row]), int(keys[row])
            assert begin + count <= int(edges[row + 1])
            pages = table[row, : -(-length // page_size)].long()
            seen = [cache[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for cache in (k, v)]
            for index in range(count):
                visible = length - count + index + 1
                if visible <= 0:
                    out[begin + index] = 0
                    continue
                query = q[begin + index].double() * given["softmax_scale"]
                weights = torch.einsum("hd,lhd->hl", query, seen[0][:visible]).softmax(-1)
                out[begin + index] = torch.einsum("hl,lhd->hd", weights, seen[1][:visible]).to(out.dtype)
        return out, *(q.new_empty(0, dtype=torch.float32) for _ in range(3))


@pytest.fixture
def stand_in() -> Iterator[tuple[Callable[..., Any], StandIn]]:
    """An op of the package's schema, and the function behind it."""
    library, behind = torch.library.Library("flash_stand_in", "DEF"), StandIn()
    library.define(SCHEMA)
    library.impl("fwd", behind.__call__, "CPU", with_keyset=False)
    yield torch.ops.flash_stand_in.fwd.default, behind
    library._destroy()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_pad_tokens", [0, 5])
@pytest.mark.parametrize(("seq_lens", "query_lens"), ROWS)
def test_what_the_package_is_asked_for(
    stand_in: tuple[Callable[..., Any], StandIn],
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    num_pad_tokens: int,
    dtype: torch.dtype,
) -> None:
    """A pool of NaN but for live positions, views with strides of their own, and a table of any width."""
    forward, behind = stand_in
    case = make_case(seq_lens, query_lens, num_kv_heads=2, group=3, head_size=64, dtype=dtype,
                     num_pad_tokens=num_pad_tokens)  # fmt: skip
    rows, calls = planned((plan_in_torch, "cpu"), case), behind.calls

    def op(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> None:
        attend(forward, q, k_cache, v_cache, rows, case.scale, rest[-1])

    out = case.run(op, device="cpu")
    torch.testing.assert_close(out, case.expected().to(dtype))
    assert not out[len(out) - num_pad_tokens :].any()
    (call,) = calls
    asked = {name: value for name, value in call.items() if name not in ("q", "k", "v", "out")}
    assert {name for name, value in asked.items() if isinstance(value, Tensor)} == {
        "cu_seqlens_q", "seqused_q", "seqused_k", "page_table",
    }  # fmt: skip
    assert asked["page_table"] is rows.page_table or torch.equal(asked["page_table"], rows.page_table)
    assert (asked["is_causal"], asked["num_splits"], asked["max_seqlen_q"]) == (True, 1, len(case.q))
    assert asked["softmax_scale"] == case.scale
    assert (asked["window_size_left"], asked["window_size_right"], asked["softcap"]) == (-1, -1, 0.0)
    assert call["k"].data_ptr() != call["v"].data_ptr() and call["k"].stride(0) == 2 * call["k"][0].numel()


@pytest.mark.parametrize("singles", [True, False])
@pytest.mark.parametrize(("seq_lens", "query_lens"), ROWS)
def test_the_specification_is_that_of_attention(
    seq_lens: Sequence[int], query_lens: Sequence[int], singles: bool
) -> None:
    """Bit for bit, but that rows of one token which are left out keep what they have."""
    case = make_case(seq_lens, query_lens, num_kv_heads=2, group=3, head_size=64, num_pad_tokens=2)
    rows = planned((plan_in_torch, "cpu"), case, singles)

    def op(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> None:
        ops.flash_attention(q, k_cache, v_cache, rows, case.scale, rest[-1])

    out, expected = case.run(op, device="cpu"), case.run(reference_attention.attention, device="cpu")
    for row, count in enumerate(query_lens):
        if count == 1 and not singles:
            expected[int(case.query_start[row])] = float("nan")
    assert torch.equal(out.nan_to_num(9.0), expected.nan_to_num(9.0))


# -- where there is none -----------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_dtype": torch.bfloat16,
    "block_size": 16,
    "max_rows": 256,
    "max_tokens": 2048,
}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "bfloat16 and float16, not float32"),
        ({"kv_dtype": torch.float8_e4m3fn}, "dtype, bfloat16, not float8_e4m3fn"),
        ({"head_size": 264}, "multiples of 8 up to 256, not 264"),
        ({"head_size": 60}, "multiples of 8 up to 256, not 60"),
        ({"block_size": 64}, "at most 32 tokens, not 64"),
        ({"max_rows": 992}, "up to 991 requests at once, not 992"),
        ({"max_tokens": MIN_TOKENS - 1}, "max_num_batched_tokens is 255"),
    ],
)
def test_what_cannot_go_that_way(wrong: dict[str, Any], why: str) -> None:
    found = unsupported(**GOOD | wrong)
    assert found is not None and why in found


@pytest.mark.parametrize(
    "right",
    [{}, {"dtype": torch.float16, "kv_dtype": torch.float16}, {"head_size": 80}, {"block_size": 1}, {"max_rows": 991}],
)
def test_what_can(right: dict[str, Any]) -> None:
    assert unsupported(**GOOD | right) is None


def test_there_is_none_on_the_cpu() -> None:
    assert "needs a CUDA device of compute capability 9.0" in str(missing(torch.device("cpu")))


@pytest.mark.parametrize("capability", [(8, 9), (10, 0)])
def test_there_is_none_for_another_architecture(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert f"this one has {capability[0]}.{capability[1]}" in str(missing(torch.device("cuda")))


def test_the_error_of_an_import_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash_attention.importlib, "import_module", fail)
    flash_attention._import_error.cache_clear()
    try:
        found = str(missing(torch.device("cuda")))
    finally:
        flash_attention._import_error.cache_clear()
    assert "No module named 'flash_attn_3._C'" in found and "pip install 'ostinato[flash]'" in found
