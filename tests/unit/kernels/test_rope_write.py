"""Rope and the cache write in one, against the two ops in plain torch: on the GPU where there is one, else in the
interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from decode_fused_case import BLOCK_SIZE, DEVICE, EPS
from decode_fused_case import make_case as fused_case

from ostinato.kernels import reference, reference_attention, reference_tiles
from ostinato.kernels.kv_formats import FP8_E4M3, encode

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # the interpreter's own
# The interpreter gets bfloat16 arithmetic wrong.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
WHERE = ["torch", "triton"]
FP8 = FP8_E4M3.dtype
SCALES = torch.tensor([[0.5, 0.03, 1.7], [2.0, 0.011, 0.4]])


def op(where: str) -> tuple[Callable[..., None], str]:
    """An implementation, and the device it runs on."""
    if where == "torch":
        return reference_tiles.rope_write, "cpu"
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported without its interpreter and there is no GPU")
    from ostinato.kernels.triton_rope_write import rope_write

    return rope_write, DEVICE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_size", "num_kv_heads", "group", "rotated", "norm"),
    [
        (64, 2, 4, 64, False),
        (128, 5, 1, 128, True),
        (80, 1, 3, 80, False),
        (96, 3, 3, 48, True),
        (64, 1, 16, 20, False),
    ],
)
def test_rope_write_is_rope_and_kv_write(
    head_size: int, num_kv_heads: int, group: int, rotated: int, norm: bool, dtype: torch.dtype
) -> None:
    """Tokens without a slot, one of them in the middle, are turned and not written; keys stay as they are."""
    call, device = op("triton")
    case = fused_case(
        [70, 0, 17, 3], num_kv_heads=num_kv_heads, group=group, head_size=head_size, rotated=rotated, norm=norm,
        dtype=dtype, num_pad_tokens=1, without_slot=[2],
    )  # fmt: skip
    for heads in (case.q, case.k, case.v):
        heads.nan_to_num_(nan=0.25)
    norms = (case.q_norm, case.k_norm, EPS)
    expected, keys, pool = case.q.clone(), case.k.clone(), case.pool.clone()
    reference.rope(expected, keys, case.positions, case.cos_sin, *norms)
    reference_attention.kv_write(keys, case.v, pool[:, 0], pool[:, 1], case.slot_mapping)
    live = case.on(device)
    call(
        live.q, live.k, live.v, live.positions, live.cos_sin, live.q_norm, live.k_norm, EPS, live.slot_mapping,
        live.pool[:, 0], live.pool[:, 1],
    )  # fmt: skip
    # a rotation's products and a norm's sum may be rounded otherwise
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(live.q.cpu(), expected, atol=4 * ulp, rtol=4 * ulp)
    assert torch.equal(live.k.cpu(), case.k) and torch.equal(live.v.cpu(), case.v)
    written = torch.zeros(case.pool.shape, dtype=torch.bool)
    slots = case.slot_mapping[case.slot_mapping >= 0].long()
    assert len(slots) == 2
    written[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = True
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(live.pool.cpu().view(kind)[~written], case.pool.view(kind)[~written]), "wrote elsewhere"
    torch.testing.assert_close(live.pool.cpu()[written], pool[written], atol=4 * ulp, rtol=4 * ulp)
    values = written.clone()
    values[:, 0] = False
    assert torch.equal(live.pool.cpu()[values], pool[values])


@pytest.mark.parametrize("where", WHERE)
def test_rope_write_under_scales(where: str) -> None:
    """Into FP8 on a GPU; in the interpreter, which rounds to it otherwise, to float32 under the same scales."""
    call, device = op(where)
    kind = torch.float32 if where == "triton" and DEVICE == "cpu" else FP8
    case = fused_case([70, 0, 17], num_kv_heads=3, group=2, norm=True)
    pool = torch.zeros(case.pool.shape).to(kind)
    case = replace(case, pool=pool)
    expected = pool.clone()
    keys = case.k.clone()
    reference.rope(case.q.clone(), keys, case.positions, case.cos_sin, case.q_norm, case.k_norm, EPS)
    for token, slot in enumerate(case.slot_mapping[:3].tolist()):
        if slot >= 0:
            block, cell = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            for index, new in enumerate((keys, case.v)):
                expected[block, index, cell] = encode(new[token], SCALES[index][:, None], kind)
    live = case.on(device)
    call(
        live.q, live.k, live.v, live.positions, live.cos_sin, live.q_norm, live.k_norm, EPS, live.slot_mapping,
        live.pool[:, 0], live.pool[:, 1], SCALES.to(device),
    )  # fmt: skip
    step = torch.finfo(kind).eps if kind == FP8 else 1e-5
    torch.testing.assert_close(live.pool.cpu().float(), expected.float(), atol=2**-9, rtol=step)


@pytest.mark.parametrize("where", WHERE)
def test_rope_write_of_no_tokens(where: str) -> None:
    call, device = op(where)
    heads = (torch.zeros(0, 4, 8, device=device), *(torch.zeros(0, 2, 8, device=device) for _ in range(2)))
    none = torch.zeros(0, dtype=torch.int32, device=device)
    caches = [torch.ones(2, BLOCK_SIZE, 2, 8, device=device) for _ in range(2)]
    call(*heads, none, torch.zeros(3, 8, device=device), None, None, EPS, none, *caches)
    assert all(cache.eq(1).all() for cache in caches)
