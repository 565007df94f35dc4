"""The contract of a graph backend: one suite, every backend."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from ostinato.errors import CaptureError, StaleGraphError
from ostinato.graphs.recorder import Cut, EagerSegment, GraphSegment, no_cut
from tests.graphs.conftest import Bench, quiet

ROWS, WIDTH, LAYERS = 5, 12, 3  # odd on purpose: no power of two
ATTENTION = frozenset({"attention"})


class TinyModel:
    """Projections, a cache written in place, and attention over it: the shape of a decoder, small."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.x = bench.randn("x", ROWS, WIDTH)
        self.slots = bench.static("slots", torch.arange(ROWS))
        self.cache = bench.zeros("cache", 32, WIDTH)
        self.q = bench.zeros("q", ROWS, WIDTH)
        self.attended = bench.zeros("attended", ROWS, WIDTH)
        self.out = bench.zeros("out", ROWS, WIDTH)
        self.weights = [
            (bench.randn(f"layers.{i}.a", WIDTH, 2 * WIDTH), bench.randn(f"layers.{i}.b", WIDTH, WIDTH))
            for i in range(LAYERS)
        ]
        bench.warm(lambda: self.step(no_cut))

    def step(self, cut: Cut) -> None:
        hidden = self.x
        for a, b in self.weights:
            query, key = torch.mm(F.rms_norm(hidden, (WIDTH,)), a).split(WIDTH, -1)
            self.q.copy_(query)
            self.cache.index_copy_(0, self.slots, key)
            cut("attention", self.attend)
            hidden = hidden + F.silu(torch.mm(self.attended, b))
        self.out.copy_(hidden)

    def attend(self) -> None:
        torch.mm(torch.softmax(self.q @ self.cache.t(), -1), self.cache, out=self.attended)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.bench.tensors.items()}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            self.bench.tensors[name].copy_(tensor)

    @torch.no_grad()
    def expect_same(self, replay: Callable[[], None]) -> None:
        before = self.state()
        self.step(no_cut)
        wanted = self.state()
        self.restore(before)
        replay()
        for name, tensor in self.state().items():
            assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("cuts", [frozenset(), ATTENTION, frozenset({"elsewhere"})])
def test_replay_equals_eager_bit_for_bit(bench: Bench, cuts: frozenset[str]) -> None:
    model = TinyModel(bench)
    recording = bench.recorder.record(model.step, cuts)
    for shift in (0, 7, 20):
        model.x.copy_(torch.randn(ROWS, WIDTH))
        model.slots.copy_(torch.arange(ROWS) + shift)
        model.expect_same(recording.replay)


def test_recording_has_no_effect(bench: Bench) -> None:
    model = TinyModel(bench)
    before = model.state()
    ran = []

    def step(cut: Cut) -> None:
        model.step(cut)
        cut("attention", lambda: ran.append(1))

    bench.recorder.record(step, ATTENTION)
    bench.backend.synchronize()
    assert ran == []
    for name, tensor in model.state().items():
        assert torch.equal(tensor, before[name]), name


def test_segments(bench: Bench) -> None:
    model = TinyModel(bench)
    whole = bench.recorder.record(model.step)
    cut = bench.recorder.record(model.step, ATTENTION)
    assert (len(whole.segments), whole.num_graphs) == (1, 1)
    kinds = [type(segment) for segment in cut.segments]
    assert kinds == [GraphSegment, EagerSegment] * LAYERS + [GraphSegment]
    assert cut.num_graphs == LAYERS + 1
    assert 0 < cut.num_nodes < whole.num_nodes
    assert cut.capture_s > 0
    assert cut.addresses["x"] == model.x.data_ptr()


def test_a_segment_is_prepared_once_and_outside_every_graph(bench: Bench) -> None:
    """Whoever runs the step without a recording calls the op itself."""
    counter = bench.zeros("counter", 1)
    prepared: list[torch.Tensor] = []

    class Op:
        def __call__(self) -> None:
            counter.add_(1)

        def prepare(self) -> Callable[[], None]:
            prepared.append(torch.full_like(counter, 100.0))
            assert prepared[-1].item() == 100.0  # a host read, which no graph could repeat
            return lambda: quiet(counter.add_(prepared[-1]))

    def step(cut: Cut) -> None:
        counter.mul_(2)
        cut("here", Op())
        counter.mul_(3)

    bench.warm(lambda: step(no_cut))
    counter.fill_(1)
    recording = bench.recorder.record(step, frozenset({"here"}))
    assert len(prepared) == 1 and counter.item() == 1
    recording.replay()
    assert counter.item() == 306
    recording.replay()
    assert counter.item() == 2136 and len(prepared) == 1
    step(no_cut)
    assert counter.item() == 3 * (2 * 2136 + 1)


def test_empty_graphs_are_dropped(bench: Bench) -> None:
    x = bench.zeros("x", 3)

    def step(cut: Cut) -> None:
        cut("a", lambda: None)
        buffer = torch.empty(3, device=bench.device)  # an allocation is no work
        cut("a", lambda: quiet(buffer.copy_(x + 1)))
        x.add_(buffer)
        cut("a", lambda: None)

    recording = bench.recorder.record(step, frozenset({"a"}))
    assert [type(segment) for segment in recording.segments] == [EagerSegment, EagerSegment, GraphSegment, EagerSegment]
    recording.replay()
    recording.replay()
    assert x.tolist() == [3.0, 3.0, 3.0]


def test_in_place_updates_are_seen(bench: Bench) -> None:
    model = TinyModel(bench)
    recording = bench.recorder.record(model.step)
    recording.replay()
    first = model.out.clone()
    model.weights[1][0].mul_(1.5)
    model.expect_same(recording.replay)
    assert not torch.equal(model.out, first)


def test_views_and_out_arguments(bench: Bench) -> None:
    x, w = bench.randn("x", 7, 6), bench.randn("w", 6, 9)
    out, column = bench.zeros("out", 7, 9), bench.zeros("column", 7)

    def step(cut: Cut) -> None:
        torch.mm(x, w, out=out)
        top, bottom = out[:3], out.view(63)[27:]
        top.add_(1)
        bottom.mul_(2)
        made = out.t().contiguous().view(3, 21)
        made[1].neg_()
        column.copy_(made.view(9, 7)[4])
        out[:, 0] = 5

    def eager() -> tuple[torch.Tensor, torch.Tensor]:
        step(no_cut)
        return out.clone(), column.clone()

    bench.warm(lambda: step(no_cut))
    recording = bench.recorder.record(step)
    x.mul_(3)
    wanted = eager()
    out.zero_()
    column.zero_()
    recording.replay()
    assert torch.equal(out, wanted[0])
    assert torch.equal(column, wanted[1])


def test_lists_and_multiple_outputs(bench: Bench) -> None:
    x, out = bench.randn("x", 3, 11), bench.zeros("out", 3, 22)
    rows = bench.static("rows", torch.tensor([2, 0, 1]))

    def step(cut: Cut) -> None:
        values, indices = torch.sort(x, dim=-1)
        one, two = values.split((4, 7), dim=-1)
        joined = torch.cat([two, one, indices.to(x.dtype)], dim=-1)
        out.copy_(joined[rows])

    bench.warm(lambda: step(no_cut))
    recording = bench.recorder.record(step)
    x.neg_()
    rows.copy_(torch.tensor([1, 1, 0]))
    recording.replay()
    replayed = out.clone()
    step(no_cut)
    assert torch.equal(replayed, out)


def test_outputs_made_inside_are_written_at_every_replay(bench: Bench) -> None:
    x = bench.randn("x", 3, 5)
    kept: dict[str, list[torch.Tensor]] = {}

    def step(cut: Cut) -> None:
        double = x * 2
        shifted = double + 1
        kept["all"] = [double, shifted.t(), (shifted > 0).sum(0)]

    bench.warm(lambda: step(no_cut))
    recording = bench.recorder.record(step)
    outputs = kept["all"]
    for scale in (1, -3):
        x.mul_(scale)
        recording.replay()
        step(no_cut)
        for output, wanted in zip(outputs, kept["all"], strict=True):
            assert torch.equal(output, wanted)


def test_interleaved_recordings_share_a_pool(bench: Bench) -> None:
    model = TinyModel(bench)
    recordings = [bench.recorder.record(model.step, cuts) for cuts in (ATTENTION, frozenset(), ATTENTION)]
    for number in (0, 1, 2, 1, 0, 2, 2):
        model.x.copy_(torch.randn(ROWS, WIDTH))
        model.expect_same(recordings[number].replay)


HOST_READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "float": lambda x: float(x[0, 0]),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: (x * 2).cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "host tensor": lambda x: x + torch.tensor([[1.0] * 4] * 3, device=x.device),
}


@pytest.mark.parametrize("read", HOST_READS.values(), ids=HOST_READS.keys())
def test_host_reads_raise_and_name_the_line(bench: Bench, read: Callable[[torch.Tensor], object]) -> None:
    x, out = bench.randn("x", 3, 4), bench.zeros("out", 3, 4)

    def bad(cut: Cut) -> None:
        out.copy_(x * 2)
        cut("a", lambda: None)
        out.add_(1)
        read(x)

    def good(cut: Cut) -> None:
        out.copy_(x * 2)

    with pytest.raises(CaptureError, match=r"test_backends\.py:\d+ in ") as caught:
        bench.recorder.record(bad, frozenset({"a"}))
    assert "recording" in str(caught.value)
    # nothing is left of it: the recorder and its pool work as before
    assert not out.any()
    recording = bench.recorder.record(good)
    recording.replay()
    assert torch.equal(out, x * 2)


def test_what_a_step_raises_is_passed_on(bench: Bench) -> None:
    x = bench.zeros("x", 3)

    def step(cut: Cut) -> None:
        x.add_(1)
        raise KeyError("a step's own error")

    with pytest.raises(KeyError, match="own error"):
        bench.recorder.record(step)
    bench.recorder.record(lambda cut: quiet(x.add_(1))).replay()
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_recording_inside_a_recording_raises(bench: Bench) -> None:
    with pytest.raises(CaptureError, match="inside a recording"):
        bench.recorder.record(lambda cut: quiet(bench.recorder.record(lambda cut: None)))
    with pytest.raises(CaptureError, match="begin"):
        bench.backend.end()


def test_moved_and_replaced_statics_are_named(bench: Bench) -> None:
    model = TinyModel(bench)
    recording = bench.recorder.record(model.step)
    bench.statics.verify(recording.addresses)
    old = bench.tensors["layers.1.b"]
    bench.tensors["layers.1.b"] = old.clone()
    with pytest.raises(StaleGraphError, match=r"layers\.1\.b.*in place"):
        bench.statics.verify(recording.addresses)
    bench.tensors["layers.1.b"] = old
    bench.statics.verify(recording.addresses)
    model.x.data = model.x.data.clone()
    with pytest.raises(StaleGraphError, match="'x'"):
        bench.statics.verify(recording.addresses)


def test_memory_counts_what_is_retained(bench: Bench) -> None:
    x = bench.zeros("x", 1 << 20)
    kept = []
    recording = bench.recorder.record(lambda cut: kept.append(x + 1))
    assert recording.bytes >= 4 << 20
    assert bench.backend.memory() >= recording.bytes
