"""What the tape promises beyond the contract of all backends."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from ostinato.errors import CaptureError, StaleGraphError
from ostinato.graphs.recorder import Cut, no_cut
from ostinato.graphs.tape import TapeBackend
from tests.graphs.conftest import Bench, quiet


@pytest.fixture
def tape() -> Bench:
    return Bench(TapeBackend())


def test_outputs_are_poison_until_the_first_replay(tape: Bench) -> None:
    x = tape.zeros("x", 3, 5)
    kept: list[torch.Tensor] = []
    recording = tape.recorder.record(lambda cut: kept.extend([x + 1, (x > 0).to(torch.int32)]))
    assert kept[0].isnan().all()
    assert (kept[1] == torch.iinfo(torch.int32).max).all()
    recording.replay()
    assert (kept[0] == 1).all()
    assert (kept[1] == 0).all()


def test_an_output_made_by_data_sharing_is_an_output(tape: Bench) -> None:
    x = tape.zeros("x", 3)
    kept: list[torch.Tensor] = []
    recording = tape.recorder.record(lambda cut: kept.append((x + 1).data[1:]))
    x.fill_(4)
    recording.replay()
    assert kept[0].tolist() == [5.0, 5.0]


UNREPEATABLE: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "numpy": (lambda x: x.numpy(), r"\.numpy\(\)"),
    "masked_select": (lambda x: torch.masked_select(x, x > 0), "depends on data"),
    "unique": (lambda x: torch.unique(x), "depends on data"),
    "mask write": (lambda x: x.index_put_((x > 0,), x[0]), "depends on data"),
    "rand": (lambda x: torch.rand(3), "random"),
    "normal_": (lambda x: x.normal_(), "random"),
    "dropout": (lambda x: F.dropout(x, 0.5), "random"),
    "resize_": (lambda x: x.resize_(2, 2), "resizes"),
    "from_numpy": (lambda x: torch.from_numpy(__import__("numpy").ones(3)), "host values"),
    "as_tensor": (lambda x: torch.as_tensor([1, 2]), "host values"),
    "wrong out": (lambda x: torch.mm(x, x.t(), out=x[:2, :2]), "resizes its output"),
    "equal": (lambda x: torch.equal(x, x), "on the host"),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", UNREPEATABLE)
@pytest.mark.parametrize("inference", [False, True])
def test_unrepeatable_operations_raise(tape: Bench, name: str, inference: bool) -> None:
    run, words = UNREPEATABLE[name]
    x = tape.randn("x", 3, 4)
    before = x.clone()

    def step(cut: Cut) -> None:
        with torch.inference_mode(inference):
            run(x)

    with pytest.raises(CaptureError, match=rf"test_tape\.py:\d+ in .*{words}"):
        tape.recorder.record(step)
    assert torch.equal(x, before)


@pytest.mark.parametrize("inference", [False, True])
def test_what_looks_alike_but_is_repeatable(tape: Bench, inference: bool) -> None:
    x, index = tape.randn("x", 4, 6), tape.static("index", torch.tensor([3, 1, 1]))
    out = tape.zeros("out", 4, 6)

    def step(cut: Cut) -> None:
        with torch.inference_mode(inference):
            y = F.dropout(x, 0.5, training=False)
            q = y.view(1, 1, 4, 6)
            y = F.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(4, 6)
            y = torch.where(y > 0, y, 0.25)
            y[index] = 2.0
            y[0] = y[2]
            rows = torch.repeat_interleave(torch.arange(4), torch.full((4,), 1), output_size=4)
            out.copy_(F.linear(y, torch.eye(6))[rows])

    recording = tape.recorder.record(step)
    x.neg_()
    index.copy_(torch.tensor([0, 2, 0]))
    recording.replay()
    replayed = out.clone()
    step(no_cut)
    assert torch.equal(replayed, out)


def test_a_tensor_from_outside_must_be_registered(tape: Bench) -> None:
    x, stray = tape.zeros("x", 3), torch.ones(3)
    with pytest.raises(CaptureError, match=r"new static input .*float32.*\(3,\)"):
        tape.recorder.record(lambda cut: quiet(x.add_(stray)))
    tape.static("stray", stray)
    view_from_before = stray[1:]
    tape.recorder.record(lambda cut: quiet(x[1:].add_(view_from_before))).replay()
    assert x.tolist() == [0.0, 1.0, 1.0]


def test_wrong_shapes_raise_while_recording(tape: Bench) -> None:
    x, y = tape.zeros("x", 3), tape.zeros("y", 4)
    with pytest.raises(RuntimeError, match=r"Size\(\[4\]\)|size of tensor"):
        tape.recorder.record(lambda cut: quiet(x.add_(y)))


@pytest.mark.parametrize("how", ["data", "rebound", "resized"])
def test_every_replay_notices_a_moved_static(tape: Bench, how: str) -> None:
    x, out = tape.randn("weights.x", 3), tape.zeros("out", 3)
    recording = tape.recorder.record(lambda cut: quiet(out.copy_(x * 2)))
    recording.replay()
    if how == "data":
        x.data = x.data.clone()
    elif how == "rebound":
        tape.tensors["weights.x"] = x.clone()
    else:
        x.resize_(1 << 16)
    with pytest.raises(StaleGraphError, match=r"weights\.x.*0x"):
        recording.replay()


def test_outputs_that_nobody_uses_any_more_cost_nothing(tape: Bench) -> None:
    x = tape.zeros("x", 1 << 10)

    def step(cut: Cut) -> None:
        residual = x + 1
        for _ in range(5):
            delta = residual * 2  # alive at the next cut, but not read after it
            residual += delta
            cut("a", lambda: None)
        x.copy_(residual)

    recording = tape.recorder.record(step, frozenset({"a"}))
    assert recording.bytes == 4 << 10  # the residual
    recording.replay()
    assert (x == 3**5).all()
    del recording
    gc.collect()
    assert tape.backend.memory() == 0


def test_custom_operators_are_opaque(tape: Bench) -> None:
    def scale_impl(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * float(x.sum()))  # a kernel may read its inputs

    with torch.library._scoped_library("ostinato_test_tape", "FRAGMENT") as library:
        library.define("scale(Tensor x, Tensor(a!) out) -> ()")
        library.impl("scale", scale_impl, "CPU")
        x, out = tape.static("x", torch.tensor([1.0, 2.0, 3.0])), tape.zeros("out", 3)
        recording = tape.recorder.record(lambda cut: torch.ops.ostinato_test_tape.scale(x, out))
        assert not out.any()
        assert recording.num_nodes == 1
        x.add_(1)
        recording.replay()
    assert out.tolist() == [18.0, 27.0, 36.0]


def test_gradients_are_not_recorded(tape: Bench) -> None:
    w, out = tape.randn("w", 3, 3), tape.zeros("out", 3, 3)
    w.requires_grad_()
    recording = tape.recorder.record(lambda cut: quiet(out.copy_(w @ w)))
    recording.replay()
    assert torch.equal(out, (w @ w).detach())
    assert recording.bytes == 0
