"""The ops as torch sees them: schemas that tell the truth about mutation, shapes without data, lazy imports."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from ops_case import sampling_state
from torch._subclasses import FakeTensorMode

from ostinato.kernels import ops
from ostinato.kernels.decode_tiles import FIRST_TILE, LAST_TILE

NUM_SLOTS, MAX_LENGTH, NUM_VOCAB, BLOCK_SIZE = 4, 12, 11, 4


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def filled(value: int, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.int32)


def example(name: str) -> tuple[Any, ...]:
    """Valid arguments of an op, at which it writes to everything that it may write to."""
    rows = (ints(0, 2, 1, 3), ints(0, 2, 3, 6, 6))
    state = (filled(3, NUM_SLOTS), filled(5, NUM_SLOTS))
    tokens = filled(7, NUM_SLOTS, MAX_LENGTH)
    if name == "prepare":
        table = filled(1, NUM_SLOTS, 3)
        outs = (filled(-9, 7), filled(-9, 7), filled(-9, 7), filled(-9, 4), filled(-9, 4))
        return (*rows, *state, tokens, table, 0, 4, BLOCK_SIZE, *outs)
    if name == "advance":
        counts, ring = filled(0, NUM_SLOTS, NUM_VOCAB), filled(9, 2, 4)
        return (*rows, ints(5, 6, 8, -1), 0, 4, tokens, *state[::-1], counts, ints(3), ring)
    if name == "plan_tiles":
        outs = (filled(-9, 5), filled(-9, 9, 2), filled(-9, 9, 2))
        return (
            ints(11, 0, 9, 1),
            ints(0, 1, 2, 3, 6),
            filled(1, 3, 3),
            ints(0, 2, 1, 0),
            0,
            4,
            BLOCK_SIZE,
            BLOCK_SIZE,
            8,
            *outs,
        )
    if name == "plan_flash":
        outs = (filled(-9, 5, 3), filled(-9, 6), filled(-9, 5), filled(-9, 5))
        return (
            ints(11, 0, 9, 1),
            ints(0, 2, 2, 5, 6),
            filled(1, 3, 3),
            ints(0, 2, 1, 0),
            4,
            7,
            BLOCK_SIZE,
            True,
            *outs,
        )
    if name == "flash_attention":
        caches = (torch.randn(5, BLOCK_SIZE, 2, 8), torch.randn(5, BLOCK_SIZE, 2, 8))
        rows = (filled(1, 2, 3), ints(0, 2, 3), ints(2, 1), ints(5, 0))
        return (torch.randn(3, 4, 8), *caches, *rows, 0.5, filled(7, 3, 4, 8).float())
    if name in ("attend_tiles", "rope_write"):
        caches = (torch.randn(5, BLOCK_SIZE, 2, 8), torch.randn(5, BLOCK_SIZE, 2, 8))
        if name == "rope_write":
            heads = (torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8))
            angles = (ints(1, 2, 3), torch.randn(9, 8), torch.randn(8), torch.randn(8), 1e-5)
            return (*heads, *angles, ints(7, -1, 12), *caches, torch.ones(2, 2))
        info = torch.tensor([[8 << 16 | FIRST_TILE, 0], [3 << 16 | LAST_TILE, 0]], dtype=torch.int32)
        tiles = (ints(0, 2), info, ints(4, 8, 12, 16).view(2, 2), ints(0, 1))
        outs = (torch.zeros(1, 4, 8), filled(0, 2), torch.zeros(2 * 4 * 9))
        return (torch.randn(1, 4, 8), *caches, *tiles, 0.5, 1, 1, 8, 1, *outs, torch.ones(2, 2))
    if name == "embed":
        return (ints(2, 0), torch.randn(3, 5), torch.zeros(2, 5))
    if name == "scatter":
        return (filled(0, 9), torch.tensor([[3, 4], [8, 5], [0, 0]], dtype=torch.int32), 2)
    if name in ("rms_norm", "add_rms_norm"):
        x, residual, weight = torch.randn(3, 10), torch.randn(3, 10), torch.randn(10)
        return (x, weight, 1e-5) if name == "rms_norm" else (x, residual, weight, 1e-5)
    if name == "rope":
        heads = (torch.randn(3, 4, 8), torch.randn(3, 2, 8))
        return (*heads, ints(1, 2, 3), torch.randn(9, 8), torch.randn(8), torch.randn(8), 1e-5)
    if name in ("silu_mul", "invariant_silu_mul"):
        return (torch.randn(3, 14),)
    if name == "invariant_linear":
        return (torch.randn(3, 10), torch.randn(4, 10), torch.randn(4), torch.zeros(3, 4))
    if name == "invariant_attention":
        caches = (torch.randn(5, BLOCK_SIZE, 2, 8), torch.randn(5, BLOCK_SIZE, 2, 8))
        query_start, seq_lens = ints(0, 2, 3), ints(5, 2)
        return (torch.randn(3, 4, 8), *caches, filled(1, 3, 3), ints(0, 2), query_start, seq_lens, 0.5, 2,
                torch.zeros(3, 4, 8), torch.ones(2, 2))  # fmt: skip
    if name == "gather_blocks":
        caches = (torch.randn(5, BLOCK_SIZE, 2, 8), torch.randn(5, BLOCK_SIZE, 2, 8))
        targets = (torch.zeros(6, BLOCK_SIZE, 2, 8), torch.zeros(6, BLOCK_SIZE, 2, 8))
        return (*caches, filled(1, 3, 3), ints(0, 2), ints(5, 2), 2, *targets)
    if name == "copy_blocks":
        source, target = (torch.randint(0, 255, (count, 3, 16), dtype=torch.uint8) for count in (4, 5))
        return (source, target, ints(3, 0), ints(1, 4), 1, 2)
    logits, slots = torch.randn(3, NUM_VOCAB), ints(0, 1, 2)
    if name == "sample":
        sampling = sampling_state(NUM_SLOTS, NUM_VOCAB, temperature=[0.0, 1.0, 1.0], flags=[1, 0, 2], top_p=[0.5] * 3)
        return (logits, slots, *sampling, torch.zeros(4, NUM_VOCAB), filled(9, 4))
    if name == "small_linear_sample":
        sampling = sampling_state(NUM_SLOTS, NUM_VOCAB, temperature=[0.0, 1.0, 1.0], flags=[1, 0, 2], top_p=[0.5] * 3)
        outs = (torch.zeros(3, NUM_VOCAB), torch.zeros(4, NUM_VOCAB), filled(9, 4))
        return (torch.randn(3, 5), torch.randn(NUM_VOCAB, 5), slots, *sampling, filled(-1, NUM_SLOTS), *outs)
    if name == "logprobs":
        return (logits, slots, ints(2, 0, 1, -1), ints(5, 2, 3), torch.zeros(4, 22), filled(0, 4, 22))
    raise AssertionError(name)


NAMES = [
    "invariant_linear",
    "invariant_attention",
    "invariant_silu_mul",
    "prepare",
    "plan_tiles",
    "plan_flash",
    "flash_attention",
    "attend_tiles",
    "rope_write",
    "rms_norm",
    "add_rms_norm",
    "rope",
    "silu_mul",
    "embed",
    "scatter",
    "sample",
    "small_linear_sample",
    "logprobs",
    "advance",
    "copy_blocks",
    "gather_blocks",
]

CUDA_ONLY = {("attend_tiles", "counters"), ("attend_tiles", "partials")}
"""What a CPU has no use for: a workspace, and counters that are zero again."""


@pytest.mark.parametrize("name", NAMES)
def test_op_mutates_what_its_schema_says_and_has_a_shape_function(name: str) -> None:
    op = getattr(torch.ops.ostinato, name).default
    torch.library.opcheck(op, example(name), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", NAMES)
def test_op_writes_to_every_argument_marked_as_mutated(name: str) -> None:
    op = getattr(torch.ops.ostinato, name).default
    args = example(name)
    before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    op(*args)
    for info, old, new in zip(op._schema.arguments, before, args, strict=True):
        if isinstance(new, torch.Tensor) and (name, info.name) not in CUDA_ONLY:
            assert torch.equal(old, new) is not bool(info.is_write), info.name


def test_every_op_has_a_wrapper_with_its_name() -> None:
    for name in [*NAMES, "kv_write", "attention"]:
        assert callable(getattr(ops, name)) and name in ops.__all__
        assert hasattr(torch.ops.ostinato, name)


def test_shapes_without_data() -> None:
    with FakeTensorMode():
        x, weight = torch.empty(5, 12, dtype=torch.bfloat16), torch.empty(12, dtype=torch.bfloat16)
        assert ops.silu_mul(x).shape == (5, 6)
        normed = ops.add_rms_norm(x[:, :6], x[:, 6:], weight[:6], 1e-5)
        assert normed.shape == (5, 6) and normed.is_contiguous() and normed.dtype == torch.bfloat16


def test_a_cpu_process_never_imports_triton() -> None:
    program = (
        "import sys, torch; from ostinato.kernels import ops; ops.rms_norm(torch.ones(3, 4), torch.ones(4), 1e-5);"
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
