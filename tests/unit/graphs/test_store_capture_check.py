"""Recording as a phase, the store, and the twin check, over the CPU backend."""

import gc

import pytest
import torch

from ostinato.errors import CaptureError, StaleGraphError
from ostinato.graphs.capture import record_all, record_one
from ostinato.graphs.check import Twin, poison_
from ostinato.graphs.dispatch import BatchKey, BatchShape, Dispatcher
from ostinato.graphs.mode import CUDAGraphMode, RuntimeMode
from ostinato.graphs.recorder import Cut, Recorder
from ostinato.graphs.statics import Statics
from ostinato.graphs.store import GraphStore
from ostinato.graphs.tape import TapeBackend

FULL, PIECEWISE = RuntimeMode.FULL, RuntimeMode.PIECEWISE
CUTS = {FULL: frozenset[str](), PIECEWISE: frozenset({"attention"})}
CHOOSER = Dispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, (1, 3, 7), (2, 5), 7)


class Engine:
    """A running sum over the rows of a key."""

    def __init__(self) -> None:
        self.x, self.total = torch.ones(7), torch.zeros(7)
        self.statics = Statics()
        self.statics.add("x", lambda: self.x)
        self.statics.add("total", lambda: self.total)
        self.store = GraphStore(self.statics)
        self.recorder = Recorder(TapeBackend(), self.statics)
        self.ran: list[tuple[RuntimeMode, BatchKey]] = []

    def step(self, mode: RuntimeMode, key: BatchKey, cut: Cut) -> None:
        self.ran.append((mode, key))
        self.total[: key.num_tokens].add_(self.x[: key.num_tokens])
        cut("attention", lambda: self.total.mul_(2) is None)
        self.total[: key.num_tokens].add_(1)

    def record(self, **kwargs: object) -> object:
        return record_all(
            self.store,
            self.recorder,
            CHOOSER.keys(),
            step=self.step,
            cuts=CUTS,
            **kwargs,  # type: ignore[arg-type]
        )


def test_record_all_goes_through_the_phases_in_order() -> None:
    engine = Engine()
    prepared, progress, collecting = [], [], []

    def prepare(mode: RuntimeMode, key: BatchKey) -> None:
        prepared.append((mode, key))
        collecting.append(gc.isenabled())

    keys = CHOOSER.keys()
    summary = record_all(
        engine.store,
        engine.recorder,
        list(reversed(keys)),
        step=engine.step,
        cuts=CUTS,
        prepare=prepare,
        warm_up=True,
        progress=lambda done, total: progress.append((done, total)),
    )
    assert engine.ran == prepared == keys * 2
    assert [mode for mode, _ in keys] == [PIECEWISE] * 2 + [FULL] * 3
    assert collecting == [True] * 5 + [False] * 5
    assert gc.isenabled()
    assert progress == [(n, 5) for n in range(1, 6)]
    assert engine.store.sealed
    assert summary.num_recordings == engine.store.num_recordings == 5
    assert summary.record_s >= engine.store.seconds > 0
    assert summary.bytes == engine.store.bytes
    assert [(row.mode, row.key, row.num_graphs) for row in engine.store.table()] == [
        (mode, key, 2 if mode is PIECEWISE else 1) for mode, key in keys
    ]


def test_warming_up_with_another_step() -> None:
    engine, warmed = Engine(), []
    engine.record(warm=lambda mode, key, cut: warmed.append((mode, key)), warm_up=True)
    assert warmed == engine.ran == CHOOSER.keys()


def test_a_backend_that_needs_no_warm_up_gets_none() -> None:
    engine = Engine()
    engine.record()
    assert engine.ran == CHOOSER.keys()
    assert not engine.total.any()


def test_store_replays_what_was_picked() -> None:
    engine = Engine()
    engine.record()
    decision = CHOOSER.pick(BatchShape(2, 2, 1), available=engine.store.available())
    engine.store.replay(decision.mode, decision.key)
    assert engine.total.tolist() == [3, 3, 3, 0, 0, 0, 0]
    decision = CHOOSER.pick(BatchShape(4, 2, None), available=engine.store.available())
    assert (decision.mode, decision.key) in engine.store
    engine.store.replay(decision.mode, decision.key)
    assert engine.total.tolist() == [9, 9, 9, 3, 3, 0, 0]


def test_a_sealed_store_refuses_recordings() -> None:
    engine = Engine()
    engine.record()
    key = BatchKey(4, 4, None)
    with pytest.raises(CaptureError, match=r"FULL .*num_tokens=4.*unsealed"):
        record_one(engine.store, engine.recorder, FULL, key, step=engine.step, cuts=CUTS)
    with pytest.raises(CaptureError, match="unsealed"):
        engine.record()
    with engine.store.unsealed():
        record_one(engine.store, engine.recorder, FULL, key, step=engine.step, cuts=CUTS)
        with pytest.raises(CaptureError, match="recorded already"):
            record_one(engine.store, engine.recorder, FULL, key, step=engine.step, cuts=CUTS)
    assert engine.store.sealed
    engine.store.replay(FULL, key)
    assert engine.total.tolist() == [3, 3, 3, 3, 0, 0, 0]


def test_a_failed_recording_leaves_the_store_open_and_the_collector_on() -> None:
    engine = Engine()

    def step(mode: RuntimeMode, key: BatchKey, cut: Cut) -> None:
        if key.num_tokens == 3:
            engine.x.tolist()
        engine.step(mode, key, cut)

    with pytest.raises(CaptureError, match="tolist"):
        record_all(engine.store, engine.recorder, CHOOSER.keys(), step=step, cuts=CUTS)
    assert gc.isenabled()
    assert not engine.store.sealed
    assert engine.store.num_recordings == 3
    engine.store.clear()
    engine.record()
    assert engine.store.num_recordings == 5


def test_store_checks_addresses_at_the_first_replay_and_when_asked() -> None:
    engine = Engine()
    engine.record()
    spare = engine.x.clone()
    key = BatchKey(3, 3, 1)
    engine.x, spare = spare, engine.x
    with pytest.raises(StaleGraphError, match="'x'"):
        engine.store.replay(FULL, key)
    engine.x, spare = spare, engine.x
    engine.store.replay(FULL, key)
    engine.store.recheck()
    engine.total = engine.total.clone()
    with pytest.raises(StaleGraphError, match="'total'"):
        engine.store.replay(FULL, key)


def test_a_missing_recording_is_named() -> None:
    with pytest.raises(CaptureError, match="num_tokens=9"):
        Engine().store.replay(FULL, BatchKey(9, 9, 1))


def test_statics() -> None:
    statics, x, y = Statics(), torch.zeros(4, 3), torch.zeros(0)
    statics.add("x", lambda: x)
    statics.add("empty", lambda: y)
    assert statics.find(x[2:]) == "x"
    assert statics.find(torch.zeros(3)) is None
    assert statics.find(torch.zeros(0)) is None
    assert statics.addresses() == {"x": x.data_ptr(), "empty": y.data_ptr()}
    with pytest.raises(ValueError, match="'x'"):
        statics.add("x", lambda: y)
    with pytest.raises(StaleGraphError, match="not registered any more"):
        statics.verify({"gone": 1})


# -- twin --------------------------------------------------------------------------------------------------------


def twin(state: torch.Tensor) -> Twin[torch.Tensor]:
    return Twin(
        snapshot=state.clone,
        restore=lambda saved: state.copy_(saved) is None,
        observe=lambda: {"state": state.clone()},
        describe=lambda name, index: f"request r{index[0]}, {name}{list(index)}",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32])
def test_twin_agrees(dtype: torch.dtype) -> None:
    state = torch.arange(12).view(3, 4).to(dtype)
    twin(state).run(lambda: state.add_(1), lambda: state.add_(1), prove=True)
    assert state[0, 0] == 1  # one step, not three


def test_twin_compares_bits() -> None:
    state = torch.full((3, 2), float("nan"))
    twin(state).run(lambda: None, lambda: state.mul_(1))
    zeros = torch.zeros(3, 2)
    with pytest.raises(StaleGraphError, match=r"0\.0 and -0\.0"):
        twin(zeros).run(lambda: None, lambda: zeros[2].neg_())


def test_twin_names_the_element_and_both_values() -> None:
    state = torch.zeros(3, 2)

    def wrong() -> None:
        state.add_(1)
        state[2, 1] = 7

    with pytest.raises(StaleGraphError, match=r"replay.*request r2, state\[2, 1\]: 7\.0 and 1\.0 \(1 of 6 elements"):
        twin(state).run(wrong, lambda: state.add_(1))


def test_twin_does_not_blame_the_replay_for_an_unsteady_step() -> None:
    state, calls = torch.zeros(3, 2), []

    def unsteady() -> None:
        calls.append(1)
        state.add_(len(calls))

    with pytest.raises(StaleGraphError, match="two eager calls"):
        twin(state).run(lambda: state.add_(1), unsteady, prove=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_poison_floats(dtype: torch.dtype) -> None:
    assert poison_(torch.zeros(3, 5, dtype=dtype)).float().isnan().all()


def test_poison_integers() -> None:
    assert (poison_(torch.zeros(3, dtype=torch.int32), 9999) == 9999).all()
    assert (poison_(torch.zeros(3, dtype=torch.int64)) == 2**63 - 1).all()
    assert poison_(torch.zeros(3, dtype=torch.bool)).all()
