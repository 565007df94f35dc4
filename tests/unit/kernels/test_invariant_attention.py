"""`invariant_attention`: right, and a token's bits the same however its prompt is cut and whatever stands beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
from attention_case import DEVICE, AttentionCase, make_case
from ordered_dot import ordered_dot
from torch import Tensor

from ostinato.kernels import reference_invariant

triton = pytest.importorskip("triton", reason="triton is not installed")
if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without its interpreter and there is no GPU", allow_module_level=True)

from ostinato.kernels import triton_invariant  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's own
Attention = Callable[..., None]
IMPLEMENTATIONS = [(reference_invariant.invariant_attention, "cpu"), (triton_invariant.invariant_attention, DEVICE)]
NAMES = ["reference", "triton"]
DTYPES = [torch.float32, torch.float16]  # the interpreter gets bfloat16 arithmetic wrong
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}
LENGTH = 40


@pytest.fixture(autouse=True)
def _sums_in_order() -> Iterator[None]:
    with ordered_dot():
        yield


def attend(case: AttentionCase, attention: Attention, device: str) -> Tensor:
    """`AttentionCase.run`, which calls `attention` with a query length and splits too."""
    return case.run(partial(_without_choices, attention), device=device)


def _without_choices(attention: Attention, *args: object) -> None:
    *given, _query_len, num_rows, _num_splits, out = args
    attention(*given, num_rows, out)


def step_of(whole: AttentionCase, begin: int, end: int, *, first: bool) -> AttentionCase:
    """Tokens [begin, end) of row 0 of `whole` as a step of their own, beside the other rows' tokens: before them or,
    not `first`, behind. Cells that are not yet written are NaN."""
    pool = whole.pool.clone()
    table = whole.block_table[int(whole.row_slot[0])]
    for position in range(end, LENGTH):
        pool[int(table[position // 16]), :, position % 16] = float("nan")
    own, others = whole.q[begin:end], whole.q[LENGTH:]
    order = [0, 1, 2] if first else [1, 2, 0]
    lengths = [end - begin, *whole.query_lens[1:]]
    edges = torch.tensor([0, *(lengths[row] for row in order)]).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor([end, *whole.seq_lens[1:3].tolist()], dtype=torch.int32)
    return AttentionCase(
        q=torch.cat([own, others] if first else [others, own]),
        pool=pool,
        block_table=whole.block_table,
        row_slot=whole.row_slot[order],
        query_start=edges,
        seq_lens=seq_lens[order],
        keys=whole.keys,
        values=whole.values,
        query_lens=tuple(lengths[row] for row in order),
        scale=whole.scale,
    )


def prompt_case(head_size: int, group: int, num_kv_heads: int, dtype: torch.dtype) -> AttentionCase:
    """A prompt of 40 tokens beside a decoding row and a chunk."""
    return make_case(
        [LENGTH, 21, 13], [LENGTH, 1, 4],
        num_kv_heads=num_kv_heads, group=group, head_size=head_size, dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize(("attention", "device"), IMPLEMENTATIONS, ids=NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accuracy(attention: Attention, device: str, dtype: torch.dtype) -> None:
    """Rows of no tokens, rows whose queries see nothing, a decoding row, and padding."""
    case = make_case(
        [37, 5, 0, 64, 3], [1, 5, 0, 33, 5], num_kv_heads=2, group=3, head_size=80, dtype=dtype, num_pad_tokens=4
    )
    out = attend(case, attention, device)
    torch.testing.assert_close(out.double(), case.expected(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not out[-4:].any()


def assert_cut(whole: AttentionCase, attention: Attention, device: str, cuts: Sequence[int], expected: Tensor) -> None:
    edges = [0, *cuts, LENGTH]
    for index, (begin, end) in enumerate(pairwise(edges)):
        first = index % 2 == 0
        out = attend(step_of(whole, begin, end, first=first), attention, device)
        own, others = (out[: end - begin], out[end - begin :]) if first else (out[begin - end :], out[: begin - end])
        assert torch.equal(own, expected[begin:end]), (edges, begin, end)
        assert torch.equal(others, expected[LENGTH:]), (edges, begin, end)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_size", "group", "num_kv_heads"), [(16, 2, 2), (80, 3, 1)])
def test_every_chunk_of_a_prompt_in_the_reference(
    head_size: int, group: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    """Every [begin, end), so every way to cut 40 tokens into steps."""
    whole = prompt_case(head_size, group, num_kv_heads, dtype)
    expected = attend(whole, reference_invariant.invariant_attention, "cpu")
    for begin in range(0, LENGTH):
        for end in range(begin + 1, LENGTH + 1, 1 if dtype == torch.float32 and group == 2 else 9):
            out = attend(step_of(whole, begin, end, first=True), reference_invariant.invariant_attention, "cpu")
            assert torch.equal(out[: end - begin], expected[begin:end]), (begin, end)
            assert torch.equal(out[end - begin :], expected[LENGTH:]), (begin, end)


@pytest.mark.parametrize(("head_size", "group", "dtype"), [(16, 2, torch.float32), (80, 3, torch.float16)])
def test_a_prompt_in_chunks_in_triton(head_size: int, group: int, dtype: torch.dtype) -> None:
    """Chunks on block edges, around them, and of one token. A few: interpreted, each takes a tenth of a second."""
    whole = prompt_case(head_size, group, 1, dtype)
    attention = triton_invariant.invariant_attention
    expected = attend(whole, attention, DEVICE)
    for cuts in ([1], [16, 32], [15, 17, 33], [38, 39]):
        assert_cut(whole, attention, DEVICE, cuts, expected)
