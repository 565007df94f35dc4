"""The fused projections for a few rows: against the separate ops, and as torch sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops_case import GPU, require_triton
from torch import Tensor

from ostinato.kernels import ops, reference, reference_few
from ostinato.kernels.few_configs import MAX_FEW_ROWS, FewConfig, Kind

EPS = 1e-5
DEVICE = "cuda" if GPU else "cpu"
# The interpreter's bfloat16 arithmetic is wrong, so that the kernels see it only on a GPU.
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if GPU else [torch.float32, torch.float16]
# Two rounding steps of outputs of size 4: sums of products run in another order, and what follows is rounded again.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6.4e-2}
KINDS: dict[str, Kind] = {"few_norm_linear": "norm", "few_gate_up_silu": "gated", "few_linear_residual": "residual"}
NAMES = list(KINDS)

# (rows, outputs, inputs): odd sizes, more blocks than programs, fewer outputs than a block.
SHAPES = [(1, 1, 24), (2, 9, 16), (3, 13, 19), (4, 21, 12)]
DOT_SHAPES = [(2, 50, 64), (3, 37, 100), (8, 21, 150)]


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=generator)).to(dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of the three ops. Rows are cut from wider tensors: only the last dimension is contiguous."""

    residual: Tensor  # [T, K]
    norm_weight: Tensor  # [K]
    weight: Tensor  # [N, K]
    gate_up: Tensor  # [2 N, K]
    bias: Tensor | None  # [2 N]
    target: Tensor  # [T, N]

    def run(self, module: Any, name: str, config: FewConfig | None = None) -> Tensor:
        """The op's result, on the CPU; what it writes to starts as `target`. A config is for `triton_few.launch`."""
        wide = torch.full((self.target.shape[0], self.target.shape[1] + 3), 7.0).to(self.target)
        out = wide[:, 1:-2].copy_(self.target)
        weight = self.gate_up if name == "few_gate_up_silu" else self.weight
        bias = None if self.bias is None else self.bias[: weight.shape[0]]
        if config is not None:
            norm_weight = None if name == "few_linear_residual" else self.norm_weight
            module.launch(config, KINDS[name], self.residual, norm_weight, weight, bias, EPS, out)
        elif name == "few_linear_residual":
            module.few_linear_residual(self.residual, weight, bias, out)
        else:
            getattr(module, name)(self.residual, self.norm_weight, weight, bias, EPS, out)
        edges = torch.cat((wide[:, :1], wide[:, -2:]), 1)
        assert torch.equal(edges, torch.full_like(edges, 7.0))
        return out.cpu()

    def on(self, device: str) -> Case:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved = {name: tensor if tensor is None else tensor.to(device) for name, tensor in fields.items()}
        return Case(**moved | {"residual": fields["residual"].to(device)})


def case(num_rows: int, num_out: int, size: int, dtype: torch.dtype, bias: bool = True) -> Case:
    weights = normal(2 * num_out, size, dtype=dtype, scale=size**-0.5)
    return Case(
        residual=normal(num_rows, size + 8, dtype=dtype)[:, :size],
        norm_weight=1 + normal(size, dtype=dtype, scale=0.1),
        weight=weights[num_out:],
        gate_up=weights,
        bias=normal(2 * num_out, dtype=dtype) if bias else None,
        target=normal(num_rows, num_out, dtype=dtype),
    )


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[expected.dtype], rtol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_references_are_the_separate_ops(dtype: torch.dtype) -> None:
    given = case(3, 13, 37, dtype)
    assert given.bias is not None
    normed = reference.rms_norm(given.residual, given.norm_weight, EPS)
    linear = torch.nn.functional.linear(normed, given.weight, given.bias[:13])
    assert torch.equal(given.run(reference_few, "few_norm_linear"), linear)
    gate_up = torch.nn.functional.linear(normed, given.gate_up, given.bias)
    assert torch.equal(given.run(reference_few, "few_gate_up_silu"), reference.silu_mul(gate_up))
    delta = torch.nn.functional.linear(given.residual, given.weight, given.bias[:13])
    assert torch.equal(given.run(reference_few, "few_linear_residual"), given.target + delta)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_kernels(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    require_triton()
    from ostinato.kernels import triton_few

    given = case(*shape, dtype, bias=shape[0] % 2 == 1)
    size = max(16, 1 << (shape[2] - 1).bit_length())
    multiply_add = FewConfig(4, size, num_warps=1, programs_per_sm=1, prefetch=1)
    close(given.on(DEVICE).run(triton_few, name, multiply_add), given.run(reference_few, name))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", DOT_SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_on_tensor_cores(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    require_triton()
    from ostinato.kernels import triton_few

    given = case(*shape, dtype, bias=shape[0] % 2 == 1)
    config = FewConfig(16, 64, num_warps=2, programs_per_sm=1, prefetch=2, dot=True)
    close(given.on(DEVICE).run(triton_few, name, config), given.run(reference_few, name))


@pytest.mark.parametrize(("block_n", "block_k"), [(1, 16), (4, 32), (8, 64)])
def test_inputs_of_several_tiles(block_n: int, block_k: int) -> None:
    require_triton()
    from ostinato.kernels import triton_few

    given = case(3, 27, 50, torch.float16)
    config = FewConfig(block_n, block_k, num_warps=1, programs_per_sm=1, prefetch=2)
    actual = given.on(DEVICE).run(triton_few, "few_linear_residual", config)
    close(actual, given.run(reference_few, "few_linear_residual"))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_ops_choose_a_kernel_themselves(num_rows: int) -> None:
    require_triton()
    from ostinato.kernels import triton_few

    given = case(num_rows, 20, 24, torch.float16)
    for name in NAMES:
        close(given.on(DEVICE).run(triton_few, name), given.run(reference_few, name))


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    require_triton()
    from ostinato.kernels import triton_few

    given = case(3, 13, 37, torch.float32)
    poisoned = dataclasses.replace(given, residual=given.residual.clone())
    poisoned.residual[1] = float("nan")
    results = [one.on(DEVICE).run(triton_few, name) for one in (given, poisoned)]
    assert torch.equal(results[0][[0, 2]], results[1][[0, 2]])
    assert results[1][1].isnan().all()


@pytest.mark.parametrize("num_rows", [0, MAX_FEW_ROWS + 1])
def test_other_numbers_of_rows_are_refused(num_rows: int) -> None:
    require_triton()
    from ostinato.kernels import triton_few

    for name in NAMES:
        with pytest.raises(ValueError, match=f"1 to {MAX_FEW_ROWS} rows, got {num_rows}; use the separate ops"):
            case(num_rows, 5, 8, torch.float32).on(DEVICE).run(triton_few, name)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_ops_mutate_what_their_schemas_say(name: str, bias: bool) -> None:
    given = case(3, 6, 10, torch.float32, bias)
    op = getattr(torch.ops.ostinato, name).default
    shared = (given.norm_weight, given.gate_up if name == "few_gate_up_silu" else given.weight)
    half = None if given.bias is None else given.bias[: shared[1].shape[0]]
    if name == "few_linear_residual":
        args: tuple[object, ...] = (given.residual, given.weight, half, given.target)
    else:
        args = (given.residual, *shared, half, EPS, given.target)
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
    before = given.target.clone()
    assert getattr(ops, name)(*args) is None and name in ops.__all__
    assert not torch.equal(before, given.target)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_a_chain_in_a_graph_waits_for_what_it_reads(num_rows: int) -> None:
    """Each kernel starts before its predecessor ends: 24 layers, replayed, give the bits of kernels run one by one."""
    size, inner, eps = 512, 1376, 1e-5
    layers = [
        tuple(normal(*shape, dtype=torch.bfloat16, scale=0.03).cuda() for shape in ((size, size), (2 * inner, size),
                                                                                   (size, inner)))
        for _ in range(24)
    ]  # fmt: skip
    ones = torch.ones(size, dtype=torch.bfloat16, device="cuda")
    start = normal(num_rows, size, dtype=torch.bfloat16).cuda()
    residual = torch.empty_like(start)
    hidden = torch.empty_like(start)
    activated = torch.empty(num_rows, inner, dtype=torch.bfloat16, device="cuda")

    def forward(between: Callable[[], None]) -> None:
        residual.copy_(start)
        for square, gate_up, down in layers:
            ops.few_norm_linear(residual, ones, square, None, eps, hidden)
            between()
            ops.few_linear_residual(hidden, square, None, residual)
            between()
            ops.few_gate_up_silu(residual, ones, gate_up, None, eps, activated)
            between()
            ops.few_linear_residual(activated, down, None, residual)
            between()

    forward(torch.cuda.synchronize)
    expected = residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(lambda: None)
    for _ in range(10):
        residual.fill_(float("nan"))
        graph.replay()
        assert torch.equal(residual, expected)
