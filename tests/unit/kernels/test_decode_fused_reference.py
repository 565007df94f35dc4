"""The fused decode op's specification against an answer in double precision, written out position by position."""

from __future__ import annotations

import pytest
import torch
from decode_fused_case import EPS, FusedCase, make_case
from torch import Tensor

from ostinato.kernels import ops, reference_attention


def turned(heads: Tensor, position: int, case: FusedCase, weight: Tensor | None) -> Tensor:
    """[heads, D] of one token, normalised and rotated in double precision."""
    x = heads.double()
    if weight is not None:
        x = weight.double() * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    half = case.cos_sin.shape[1] // 2
    angle = torch.complex(*case.cos_sin[position].double().split(half))
    pairs = torch.complex(x[:, :half], x[:, half : 2 * half]) * angle
    return torch.cat([pairs.real, pairs.imag, x[:, 2 * half :]], dim=-1)


def dense(case: FusedCase) -> Tensor:
    """Keys and values of each row gathered by hand, the step's own from q, k, v."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    group = case.q.shape[1] // case.k.shape[1]
    for row in range(case.num_rows):
        seq_len, position = int(case.seq_lens[row]), int(case.positions[row])
        if seq_len == 0:
            continue
        table = case.block_table[int(case.row_slot[row])]
        cells = [case.pool[int(table[p // 16]), :, p % 16].double() for p in range(seq_len)]
        if int(case.slot_mapping[row]) >= 0:
            cells[position] = torch.stack([turned(case.k[row], position, case, case.k_norm), case.v[row]])
        keys, values = torch.stack(cells).repeat_interleave(group, dim=2).unbind(1)
        query = turned(case.q[row], position, case, case.q_norm)
        weights = (torch.einsum("hd,lhd->hl", query, keys) * case.scale).softmax(-1)
        out[row] = torch.einsum("hl,lhd->hd", weights, values)
    return out


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rotated", [64, 48])
def test_reference_against_double_precision(rotated: int, norm: bool) -> None:
    case = make_case([37, 0, 16, 3], num_kv_heads=2, rotated=rotated, norm=norm, num_pad_tokens=1)
    out, pool = case.on("cpu").run(reference_attention.decode_attention)
    torch.testing.assert_close(out.double(), dense(case), atol=1e-5, rtol=1e-5)
    block, cell = divmod(int(case.slot_mapping[0]), 16)
    key = turned(case.k[0], int(case.positions[0]), case, case.k_norm)
    torch.testing.assert_close(pool[block, 0, cell].double(), key, atol=1e-5, rtol=1e-5)
    assert torch.equal(pool[block, 1, cell], case.v[0])


def test_op_runs_the_reference_on_the_cpu() -> None:
    case = make_case([37, 0, 16], norm=True)
    out, pool = case.on("cpu").run(ops.decode_attention)
    expected, expected_pool = case.on("cpu").run(reference_attention.decode_attention)
    assert torch.equal(out, expected) and torch.equal(pool.nan_to_num(), expected_pool.nan_to_num())


@pytest.mark.parametrize("norm", [False, True])
def test_op_mutates_what_its_schema_says_and_has_a_shape_function(norm: bool) -> None:
    case = make_case([7, 3, 16], norm=norm)
    pool = case.pool.nan_to_num()
    arguments = (
        case.q, case.k, case.v, case.positions, case.cos_sin, case.q_norm, case.k_norm, EPS, case.slot_mapping,
        pool[:, 0].clone(), pool[:, 1].clone(), case.block_table, case.row_slot, case.seq_lens, case.scale, 3, 2,
        torch.zeros_like(case.q), case.counters(), False,
    )  # fmt: skip
    op = torch.ops.ostinato.decode_attention.default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
