"""`invariant_linear`: right, and a row's bits the same wherever it stands and whatever stands beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from ordered_dot import ordered_dot
from torch import Tensor

from ostinato.kernels import reference, reference_invariant

triton = pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without its interpreter and there is no GPU", allow_module_level=True)

from ostinato.kernels import triton_invariant  # noqa: E402

Linear = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
IMPLEMENTATIONS = [(reference_invariant.invariant_linear, "cpu"), (triton_invariant.invariant_linear, DEVICE)]
NAMES = ["reference", "triton"]
DTYPES = [torch.float32, torch.float16]  # the interpreter gets bfloat16 arithmetic wrong
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
SIZES = [(64, 32), (37, 21), (7, 5), (1, 1), (70, 33)]
"""K and N; on (7, 5) a matrix product of MKL's gives a row other bits at another place."""


@pytest.fixture(autouse=True)
def _sums_in_order() -> Iterator[None]:
    with ordered_dot():
        yield


def problem(num_rows: int, size: int, num_out: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    shapes = ((num_rows, size), (num_out, size), (num_out,))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight / size**0.5, bias


def run(linear: Linear, device: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of a strided `x` into a strided `out`, which is NaN before."""
    wide = torch.randn(x.shape[0], x.shape[1] + 3).to(x.dtype).to(device)
    wide[:, : x.shape[1]] = x
    out = torch.full((x.shape[0], weight.shape[0] + 5), float("nan"), dtype=x.dtype, device=device)
    linear(wide[:, : x.shape[1]], weight.to(device), None if bias is None else bias.to(device), out[:, :-5])
    assert out[:, -5:].isnan().all(), "wrote outside `out`"
    return out[:, :-5].cpu()


@pytest.mark.parametrize(("linear", "device"), IMPLEMENTATIONS, ids=NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "num_out"), SIZES)
def test_accuracy(linear: Linear, device: str, dtype: torch.dtype, size: int, num_out: int) -> None:
    x, weight, bias = problem(9, size, num_out, dtype)
    for offset in (None, bias):
        exact = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
        ours = run(linear, device, x, weight, offset)
        torch.testing.assert_close(ours.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("linear", "device"), IMPLEMENTATIONS, ids=NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "num_out"), SIZES)
def test_a_row_has_the_same_bits_among_1_to_70(
    linear: Linear, device: str, dtype: torch.dtype, size: int, num_out: int
) -> None:
    """All numbers of rows for the reference; those around the tiles' edges for Triton, which is slow interpreted. The
    rows are shifted too, so that each comes to every place, beside rows that are zero or large."""
    x, weight, bias = problem(70, size, num_out, dtype)
    alone = torch.cat([run(linear, device, row, weight, bias) for row in x[:9].split(1)])
    everything = run(linear, device, x, weight, bias)
    assert torch.equal(everything[:9], alone)
    is_reference = linear is reference_invariant.invariant_linear
    counts = range(2, 71) if is_reference else (2, 33, 65)
    for count in counts:
        assert torch.equal(run(linear, device, x[:count], weight, bias), everything[:count]), count
        assert torch.equal(run(linear, device, x[-count:], weight, bias), everything[-count:]), count
    for place in (0, 1, 5, 15, 16, 31, 32, 63, 69) if is_reference else (5, 69):
        for others in (torch.zeros_like(x), 100 * x):
            others[place] = x[0]
            assert torch.equal(run(linear, device, others, weight, bias)[place], alone[0]), place


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", [96, 1537])
def test_the_cpus_norm_and_activation_are_row_local(size: int, num_threads: int) -> None:
    """With two threads and 37 rows of 1537, `silu` of all rows at once is not: see `invariant_silu_mul`."""
    x, weight = torch.randn(70, 2 * size), torch.randn(size)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        gated = torch.cat([reference_invariant.invariant_silu_mul(row.clone()) for row in x.split(1)])
        normed = torch.cat([reference.rms_norm(row[:, :size].clone(), weight, 1e-5) for row in x.split(1)])
        for count in range(1, 71):
            assert torch.equal(reference_invariant.invariant_silu_mul(x[:count].clone()), gated[:count]), count
            assert torch.equal(reference.rms_norm(x[:count, :size], weight, 1e-5), normed[:count]), count
    finally:
        torch.set_num_threads(before)


def test_nothing_to_do() -> None:
    for linear, device in IMPLEMENTATIONS:
        assert run(linear, device, *problem(0, 8, 4, torch.float32)).shape == (0, 4)
