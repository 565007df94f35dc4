"""FP8 caches and their scales: the formats themselves, and the kernels that read and write them.

Triton's interpreter reads every FP8 number exactly, NaN aside, but loses the carry when it rounds to one. So there the
kernels write numbers that need no rounding, or to caches of wider types, under the same scales; FP8 itself on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_case import AttentionCase
from attention_case import make_case as attention_case
from decode_fused_case import DEVICE, FusedCase
from decode_fused_case import make_case as fused_case
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ostinato.kernels import reference_attention, reference_invariant
from ostinato.kernels.kv_formats import FP8_E4M3, decode, encode, kv_format

FP8 = FP8_E4M3.dtype
SCALES = torch.tensor([[0.5, 0.03, 1.7], [2.0, 0.011, 0.4]])


def triton_op(module: str, name: str) -> Callable[..., None]:
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported without its interpreter and there is no GPU")
    found: Callable[..., None] = getattr(__import__(f"ostinato.kernels.{module}", fromlist=[name]), name)
    return found


def stored_as(dtype: torch.dtype, pool: Tensor, scales: Tensor = SCALES) -> Tensor:
    """A pool [N, 2, B, G, D] of floats as one of `dtype` under scales [2, G]."""
    return torch.stack([encode(pool[:, kind], scales[kind][:, None], dtype) for kind in (0, 1)], dim=1)


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=30),
    st.floats(2**-10, 2**6, width=32),
)
def test_what_is_stored_is_near_or_clipped(numbers: list[float], scale: float) -> None:
    x, scale_of = torch.tensor(numbers), torch.tensor(scale)
    back = decode(encode(x, scale_of, FP8), scale_of)
    clipped = x.clamp(-448 * scale_of, 448 * scale_of)
    # half a unit of the last of 3 bits, or of the smallest subnormal
    allowed = torch.maximum(clipped.abs() * 2**-4, torch.tensor(2**-10 * scale)) * (1 + 1e-5)
    assert ((back - clipped).abs() <= allowed).all()
    assert torch.equal(encode(back, scale_of, FP8).view(torch.uint8), encode(x, scale_of, FP8).view(torch.uint8)), (
        "what was read is not stored as it was"
    )


def test_nan_stays_and_the_rest_is_bounded() -> None:
    x = torch.tensor([float("nan"), float("inf"), -1e30, 449.0])
    stored = encode(x, torch.ones(()), FP8).float()
    assert stored[0].isnan() and stored[1:].tolist() == [448.0, -448.0, 448.0]
    half = torch.randn(9, dtype=torch.bfloat16)
    assert torch.equal(encode(half, None, torch.bfloat16), half)


def test_names() -> None:
    assert kv_format("fp8", torch.bfloat16) is kv_format("fp8_e4m3", torch.float16) is FP8_E4M3
    auto = kv_format("auto", torch.bfloat16)
    assert (auto.name, auto.itemsize, auto.has_scales) == ("bfloat16", 2, False)
    assert (FP8_E4M3.itemsize, FP8_E4M3.has_scales, FP8_E4M3.largest) == (1, True, 448.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("where", ["torch", "triton"])
@pytest.mark.parametrize("needs_rounding", [True, False])
def test_written_under_scales(where: str, dtype: torch.dtype, needs_rounding: bool) -> None:
    kv_write = reference_attention.kv_write if where == "torch" else triton_op("triton_kv_write", "kv_write")
    device = "cpu" if where == "torch" else DEVICE
    kv, scales, kind = torch.randn((2, 4, 3, 64), generator=torch.Generator().manual_seed(0)) * 9, SCALES, FP8
    if not needs_rounding:
        scales = torch.tensor([[0.5, 4.0, 1.0], [2.0, 0.25, 8.0]])
        kv = encode(kv, scales[:, None, :, None], FP8).float() * scales[:, None, :, None]
        kv[0, 0, 0, :2] = torch.tensor([300.0, -1000.0])  # above 448 times a scale of 0.5
    elif where == "triton" and DEVICE == "cpu":
        kind = dtype
    k, v = kv.to(dtype).unbind()
    pool = torch.zeros((3, 2, 16, 3, 64)).to(kind).to(device)
    slots = torch.tensor([17, -1, 40, 5], dtype=torch.int32, device=device)
    kv_write(k.to(device), v.to(device), pool[:, 0], pool[:, 1], slots, scales.to(device))
    expected = torch.zeros(pool.shape)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // 16, 0, slot % 16], expected[slot // 16, 1, slot % 16] = k[token], v[token]
    wanted = stored_as(kind, expected, scales)
    if where == "torch" or not needs_rounding:
        assert torch.equal(pool.cpu().view(torch.uint8), wanted.view(torch.uint8))
    else:
        assert_stored(pool.cpu(), wanted)


def assert_stored(pool: Tensor, wanted: Tensor) -> None:
    """To one rounding: a GPU divides by a scale to within two units of the last place."""
    step = torch.finfo(pool.dtype).eps
    torch.testing.assert_close(
        pool.float(), wanted.float(), rtol=4 * step if step < 0.1 else step, atol=2**-9, equal_nan=True
    )


def dense(case: AttentionCase, pool: Tensor) -> Tensor:
    """The double precision answer over what the cache holds, read back."""
    read = torch.stack([decode(pool[:, kind], SCALES[kind][:, None]) for kind in (0, 1)], dim=1)
    keys, values = [], []
    for row, known in enumerate(case.keys):
        table = case.block_table[int(case.row_slot[row]), : -(-len(known) // 16)].long()
        cells = read[table].transpose(0, 1).flatten(1, 2)[:, : len(known)]  # [2, L, G, D]
        keys.append(cells[0])
        values.append(cells[1])
    return replace(case, keys=tuple(keys), values=tuple(values)).expected()


IMPLEMENTATIONS = ["torch", "torch invariant", "triton", "triton invariant"]


@pytest.mark.parametrize("query_len", [0, 1])
@pytest.mark.parametrize("where", IMPLEMENTATIONS)
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "float"])
def test_attention_reads_under_scales(where: str, query_len: int, fp8: bool) -> None:
    """A cache in FP8, and one in float32 whose scales mean the same."""
    queries = [1, 1, 1, 1] if query_len else [7, 0, 20, 1]
    case = attention_case([70, 0, 20, 33], queries, num_kv_heads=3, group=2, head_size=64, num_pad_tokens=2)
    # the interpreter has no FP8 NaN
    stored = stored_as(FP8, case.pool.nan_to_num(0.0) if "triton" in where else case.pool)
    pool = stored if fp8 else stored.float()
    op: Callable[..., Any]
    device = DEVICE if "triton" in where else "cpu"
    if "invariant" in where:
        base = (
            triton_op("triton_invariant", "invariant_attention")
            if "triton" in where
            else reference_invariant.invariant_attention
        )

        def op(*args: Any) -> None:
            base(*args[:8], args[9], args[11], SCALES.to(device))
    else:
        plain = triton_op("triton_attention", "attention") if "triton" in where else reference_attention.attention

        def op(*args: Any) -> None:
            plain(*args, SCALES.to(device))

    for num_splits in (1, 3) if where == "triton" and query_len else (1,):
        out = replace(case, pool=pool).run(op, query_len, num_splits, device=device)
        expected = dense(case, stored)
        torch.testing.assert_close(out.double()[: len(expected)], expected, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_fused_kernel_agrees_with_the_specification(dtype: torch.dtype, num_splits: int) -> None:
    """Its own token is attended to as stored."""
    fused = triton_op("triton_decode_fused", "decode_attention")
    kind = FP8 if DEVICE == "cuda" else dtype
    case = fused_case([70, 0, 17, 1], num_kv_heads=3, group=2, norm=True, dtype=dtype)
    case = replace(case, pool=stored_as(kind, case.pool))

    def run(op: Callable[..., None], live: FusedCase, splits: int) -> tuple[Tensor, Tensor]:
        scales = SCALES.to(live.q.device)
        return live.run(lambda *args: op(*args, scales), splits)

    out, pool = run(fused, case.on(DEVICE), num_splits)
    expected, expected_pool = run(reference_attention.decode_attention, case.on("cpu"), 1)
    assert_stored(pool, expected_pool)
    tolerance = 2**-3 if kind == FP8 else {torch.float32: 3e-5, torch.float16: 6e-3}[dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
