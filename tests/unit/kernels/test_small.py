"""The products of some rows: against the separate ops, and as torch sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops_case import GPU, require_triton
from torch import Tensor

from ostinato.kernels import ops, reference, reference_small
from ostinato.kernels.small_configs import MAX_SMALL_ROWS, SmallConfig, small_config

EPS = 1e-5
DEVICE = "cuda" if GPU else "cpu"
# The interpreter's bfloat16 arithmetic is wrong, so that the kernels see it only on a GPU.
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if GPU else [torch.float32, torch.float16]
# Two rounding steps of outputs of size 4: sums of products run in another order, and what follows is rounded again.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6.4e-2}
NAMES = ["small_linear", "small_gate_up_silu", "small_linear_parts"]

# (rows, outputs, inputs): tiles that hang over in every direction, none that does, one row, several blocks of rows.
SHAPES = [(5, 40, 64), (17, 33, 100), (9, 32, 96), (40, 20, 70), (1, 5, 24)]


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=generator)).to(dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of the products. Rows are cut from wider tensors: only the last dimension is contiguous."""

    x: Tensor  # [T, K]
    gate_up: Tensor  # [2 N, K]
    bias: Tensor | None  # [2 N]

    @property
    def num_out(self) -> int:
        return self.gate_up.shape[0] // 2

    def args(self, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
        weight = self.gate_up if name == "small_gate_up_silu" else self.gate_up[self.num_out :]
        return self.x, weight, None if self.bias is None else self.bias[: weight.shape[0]]

    def run(self, module: Any, name: str, config: SmallConfig | None = None, num_parts: int = 3) -> Tensor:
        """The op's result on the CPU, parts added up. Without a config the op chooses, in as many parts."""
        num_rows, args = self.x.shape[0], self.args(name)
        if name == "small_linear_parts":
            out = self.x.new_full((num_parts, num_rows, self.num_out), float("nan"), dtype=torch.float32)
        else:
            wide = self.x.new_full((num_rows, self.num_out + 3), 7.0)
            out = wide[:, 1:-2]
        if config is None:
            getattr(module, name)(*args, out)
        else:
            module.launch(config, *args, out, gated=name == "small_gate_up_silu")
        if name == "small_linear_parts":
            return out.sum(0).to(self.x.dtype).cpu()
        edges = torch.cat((wide[:, :1], wide[:, -2:]), 1)
        assert torch.equal(edges, torch.full_like(edges, 7.0))
        return out.cpu()

    def on(self, device: str) -> Case:
        return Case(self.x.to(device), self.gate_up.to(device), None if self.bias is None else self.bias.to(device))


def case(num_rows: int, num_out: int, size: int, dtype: torch.dtype, bias: bool = True) -> Case:
    return Case(
        x=normal(num_rows, size + 8, dtype=dtype)[:, :size],
        gate_up=normal(2 * num_out, size, dtype=dtype, scale=size**-0.5),
        bias=normal(2 * num_out, dtype=dtype) if bias else None,
    )


def small(num_parts: int = 1, *, turned: bool = False, prefetch: int = 32) -> SmallConfig:
    return SmallConfig(16, 16, 32, num_parts, num_warps=1, num_stages=2, turned=turned, prefetch=prefetch)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[expected.dtype], rtol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_references_are_the_separate_ops(dtype: torch.dtype) -> None:
    given = case(3, 13, 37, dtype)
    linear = torch.nn.functional.linear(*given.args("small_linear"))
    assert torch.equal(given.run(reference_small, "small_linear"), linear)
    gate_up = torch.nn.functional.linear(*given.args("small_gate_up_silu"))
    assert torch.equal(given.run(reference_small, "small_gate_up_silu"), reference.silu_mul(gate_up))
    close(given.run(reference_small, "small_linear_parts"), linear)
    parts = torch.full((3, 3, 13), float("nan"))
    reference_small.small_linear_parts(*given.args("small_linear_parts"), parts)
    assert parts[0].any() and not parts[1:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_kernels(name: str, shape: tuple[int, int, int], turned: bool, dtype: torch.dtype) -> None:
    require_triton()
    from ostinato.kernels import triton_small_gemm

    given = case(*shape, dtype, bias=shape[0] % 2 == 1)
    actual = given.on(DEVICE).run(triton_small_gemm, name, small(turned=turned), num_parts=1)
    close(actual, given.run(reference_small, name))


@pytest.mark.parametrize("size", [64, 70, 200])
@pytest.mark.parametrize("num_parts", range(1, 9))
def test_any_number_of_parts(num_parts: int, size: int) -> None:
    """More than there are steps of the loop too: those are zero, bias or not."""
    require_triton()
    from ostinato.kernels import triton_small_gemm

    given, config = case(5, 20, size, torch.float32), small(num_parts)
    actual = given.on(DEVICE).run(triton_small_gemm, "small_linear_parts", config, num_parts)
    close(actual, given.run(reference_small, "small_linear_parts"))


@pytest.mark.parametrize(("block_m", "block_n", "block_k"), [(16, 64, 16), (32, 16, 64), (64, 32, 128)])
def test_other_tiles(block_m: int, block_n: int, block_k: int) -> None:
    require_triton()
    from ostinato.kernels import triton_small_gemm

    given = case(35, 50, 150, torch.float16)
    config = dataclasses.replace(small(2), block_m=block_m, block_n=block_n, block_k=block_k, num_warps=4)
    for name in NAMES:
        close(given.on(DEVICE).run(triton_small_gemm, name, config, 2), given.run(reference_small, name))


@pytest.mark.parametrize("num_rows", [1, 7, 20])
def test_ops_choose_a_config_themselves(num_rows: int) -> None:
    require_triton()
    from ostinato.kernels import triton_small

    given = case(num_rows, 48, 128, torch.float16)
    for name in NAMES:
        if name == "small_linear" and num_rows <= 16:
            continue  # so few outputs are cuBLAS's
        close(given.on(DEVICE).run(triton_small, name), given.run(reference_small, name))


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    require_triton()
    from ostinato.kernels import triton_small_gemm

    given = case(19, 24, 70, torch.float32)
    poisoned = dataclasses.replace(given, x=given.x.clone())
    poisoned.x[4] = float("nan")
    for turned in (False, True):
        config = small(3, turned=turned)
        results = [one.on(DEVICE).run(triton_small_gemm, name, config) for one in (given, poisoned)]
        others = torch.arange(19) != 4
        assert torch.equal(results[0][others], results[1][others])
        assert results[1][4].isnan().all()


def test_shapes_without_a_config_are_refused() -> None:
    require_triton()
    from ostinato.kernels import triton_small

    for name in NAMES:
        for num_rows, num_out, size in ((MAX_SMALL_ROWS + 1, 16, 64), (0, 16, 64), (20, 15, 64), (20, 16, 65)):
            text = f"kernel for {num_rows} rows of {size} inputs and {num_out} outputs; use the separate ops"
            with pytest.raises(ValueError, match=text):
                case(num_rows, num_out, size, torch.float32).on(DEVICE).run(triton_small, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_parts", "num_rows", "size"), [(1, 3, 24), (3, 5, 37), (8, 2, 64), (2, 0, 16)])
def test_adding_up_parts(num_parts: int, num_rows: int, size: int, dtype: torch.dtype) -> None:
    require_triton()
    from ostinato.kernels import triton_small

    parts, weight = normal(num_parts, num_rows, size), 1 + normal(size, dtype=dtype, scale=0.1)
    wide = normal(num_rows, size + 5, dtype=dtype)
    residuals = [wide.clone()[:, :size] for _ in range(2)]
    expected = reference.add_rms_norm(parts.sum(0).to(dtype), residuals[0], weight, EPS)
    for add_norm in (reference_small.add_parts_rms_norm, triton_small.add_parts_rms_norm):
        residual = wide.clone().to(DEVICE)
        normed = add_norm(parts.to(DEVICE), residual[:, :size], weight.to(DEVICE), EPS)
        close(normed.cpu(), expected)
        close(residual[:, :size].cpu(), residuals[0])
        assert normed.dtype == dtype and torch.equal(residual[:, size:].cpu(), wide[:, size:])
    for add in (reference_small.add_parts, triton_small.add_parts):
        residual = wide.clone().to(DEVICE)
        add(parts.to(DEVICE), residual[:, :size])
        close(residual[:, :size].cpu(), residuals[0])
        assert torch.equal(residual[:, size:].cpu(), wide[:, size:])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_products_mutate_what_their_schemas_say(name: str, bias: bool) -> None:
    given = case(3, 6, 10, torch.float32, bias)
    out = torch.zeros((2, 3, 6) if name == "small_linear_parts" else (3, 6))
    args = (*given.args(name), out)
    torch.library.opcheck(
        getattr(torch.ops.ostinato, name).default, args, test_utils=("test_schema", "test_faketensor")
    )
    assert getattr(ops, name)(*args) is None and name in ops.__all__
    assert out.any()


@pytest.mark.parametrize("name", ["add_parts_rms_norm", "add_parts"])
def test_sums_mutate_what_their_schemas_say(name: str) -> None:
    residual = normal(3, 10)
    args = (normal(2, 3, 10), residual, *((normal(10), EPS) if name == "add_parts_rms_norm" else ()))
    torch.library.opcheck(
        getattr(torch.ops.ostinato, name).default, args, test_utils=("test_schema", "test_faketensor")
    )
    before = residual.clone()
    result = getattr(ops, name)(*args)
    assert not torch.equal(residual, before) and name in ops.__all__
    assert (result is None) == (name == "add_parts")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("num_rows", [5, 8, 16, 32, 64, 128])
def test_a_chain_in_a_graph_waits_for_what_it_reads(num_rows: int) -> None:
    """Each kernel starts before its predecessor ends: 12 layers, replayed, give the bits of kernels run one by one."""
    size, wide, inner = 1024, 4096, 3072  # Qwen3-0.6B's, which are in the table
    down = small_config("parts", size, inner, num_rows)
    assert down is not None and small_config("plain", wide, size, num_rows) is not None
    layers = [
        tuple(normal(*shape, dtype=torch.bfloat16, scale=0.03).cuda() for shape in ((wide, size), (2 * inner, size),
                                                                                   (size, inner)))
        for _ in range(12)
    ]  # fmt: skip
    ones = torch.ones(size, dtype=torch.bfloat16, device="cuda")
    start = normal(num_rows, size, dtype=torch.bfloat16).cuda()
    residual = torch.empty_like(start)
    hidden = start.new_empty(num_rows, wide)
    activated = start.new_empty(num_rows, inner)
    parts = start.new_empty((down.num_parts, num_rows, size), dtype=torch.float32)

    def forward(between: Callable[[], None]) -> None:
        residual.copy_(start)
        normed = ops.rms_norm(residual, ones, EPS)
        for qkv, gate_up, out in layers:
            between()
            ops.small_linear(normed, qkv, None, hidden)
            between()
            ops.small_gate_up_silu(hidden[:, :size], gate_up, None, activated)
            between()
            ops.small_linear_parts(activated, out, None, parts)
            between()
            normed = ops.add_parts_rms_norm(parts, residual, ones, EPS)
        between()
        ops.small_linear_parts(activated, layers[0][2], None, parts)
        between()
        ops.add_parts(parts, residual)

    forward(torch.cuda.synchronize)
    expected = residual.clone()
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(lambda: None)
    for _ in range(10):
        for tensor in (residual, hidden, activated, parts):
            tensor.fill_(float("nan"))
        graph.replay()
        assert torch.equal(residual, expected)
