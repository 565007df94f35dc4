"""The trials of other engines' users, on the tape backend: addresses, weights, fences, and faults put in on purpose."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ostinato import SamplingParams, StaleGraphError
from ostinato.graphs.mode import RuntimeMode

from . import cards
from .cards import PROMPTS, run_until_decoding, tokens_of
from .cards import small_llm as open_llm
from .conftest import TinyFactory
from .driving import ALWAYS
from .models import TinyModel


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Llama", attention_bias=True)


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_weights_in_place_then_rebound(model: TinyModel, mode: str, tmp_path: Path) -> None:
    cards.weights_in_place_then_rebound(model, mode, tmp_path)


def test_a_rebound_weight_is_found_by_a_checked_replay(model: TinyModel) -> None:
    """In check mode the addresses are compared at every checked replay, without being asked to."""
    with open_llm(model, check=ALWAYS) as llm:
        before = tokens_of(llm)
        weights = llm.engine.runner.model.weights
        original, weights.norm = weights.norm, weights.norm.clone()
        with pytest.raises(StaleGraphError, match=r"weights\.norm"):
            tokens_of(llm)
        weights.norm = original
        assert tokens_of(llm) == before, "the engine did not recover"


@pytest.mark.parametrize(
    "name", ["state.arena", "inputs.slot_mapping", "inputs.logits", "work.qkv", "kv.pool", "rope.cos_sin"]
)
def test_a_moved_static_tensor_is_named(model: TinyModel, name: str) -> None:
    """Whatever a graph has seen, by name: not only weights."""
    with open_llm(model) as llm:
        runner = llm.engine.runner
        tensor = runner.statics.current(name)
        index = next(index for index in runner.store.available() if index[0] is RuntimeMode.FULL)
        addresses = runner.store.get(*index).addresses
        runner.statics.verify(addresses)
        tensor.data = tensor.detach().clone()
        with pytest.raises(StaleGraphError, match=name.replace(".", r"\.")):
            runner.statics.verify(addresses)


# -- faults put in on purpose ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("corruption", cards.CORRUPTIONS)
def test_a_corrupted_word_of_the_state_is_named(model: TinyModel, mode: str, corruption: str) -> None:
    cards.corrupted_word(model, mode, *cards.CORRUPTIONS[corruption])


@pytest.mark.parametrize("field", ["logits", "slot_mapping", "sampled"])
def test_a_replay_that_differs_is_named(model: TinyModel, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that writes one wrong value into row 1: the error names the request, the row and the field."""
    with open_llm(model, check=ALWAYS) as llm:
        names = run_until_decoding(llm)
        runner = llm.engine.runner
        replay = runner.store.replay

        def faulty(mode: RuntimeMode, key: object) -> None:
            replay(mode, key)  # type: ignore[arg-type]
            target = getattr(runner.buffers, field)[1]
            (target[7] if target.ndim else target).add_(1)

        monkeypatch.setattr(runner.store, "replay", faulty)
        with pytest.raises(StaleGraphError) as caught:
            llm.engine.step()
        monkeypatch.undo()
    message = str(caught.value)
    assert names[1] in message
    assert "row 1" in message
    # of a wrong slot mapping, the cells that it names may be compared first
    assert field in message or (field == "slot_mapping" and "kv" in message)


def test_a_replay_that_reads_another_table_is_named(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that is wrong for the replay alone (a stale copy, say), and right when it is compared with the host's."""
    with open_llm(model, check=ALWAYS) as llm:
        names = run_until_decoding(llm)
        runner = llm.engine.runner
        replay, table = runner.store.replay, runner.state["block_table"]

        def faulty(mode: RuntimeMode, key: object) -> None:
            right = table[2, 0].clone()
            table[2, 0] = table[0, 0]
            replay(mode, key)  # type: ignore[arg-type]
            table[2, 0] = right

        monkeypatch.setattr(runner.store, "replay", faulty)
        with pytest.raises(StaleGraphError, match=rf"{names[2]}.*row 2"):
            llm.engine.step()


def test_without_check_nothing_is_compared(model: TinyModel) -> None:
    with open_llm(model) as llm:
        tokens_of(llm)
        assert llm.stats().num_checked == 0


# -- fences ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "num_requests"), [("NONE", 30), ("FULL_AND_PIECEWISE", 170)])
def test_overlap_equals_one_step_in_flight(model: TinyModel, mode: str, num_requests: int) -> None:
    cards.overlap_equals_one_step_in_flight(model, mode, num_requests)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_AND_PIECEWISE"])
def test_overlap_for_ten_thousand_steps(model: TinyModel, mode: str) -> None:
    """With 5 ms before each copy of the host's differences."""
    assert cards.overlap_equals_one_step_in_flight(model, mode, 1450, lambda: time.sleep(0.005)) > 10_000


def test_overlap_discards_what_was_computed_too_late(model: TinyModel) -> None:
    """A request that stops has one more row in flight: its token is dropped, and its row is used again safely."""
    stop = model.greedy(PROMPTS[0], 6)[5]
    runs = []
    for max_in_flight in (1, 2):
        with open_llm(model, max_in_flight=max_in_flight, max_num_seqs=2) as llm:
            params = [SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=[stop]) for _ in range(6)]
            outputs = llm.generate([PROMPTS[0], PROMPTS[1]] * 3, params)
            runs.append([(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs])
            llm.engine.scheduler.check_integrity()
    assert runs[0] == runs[1]
    assert runs[0][0][0][-1] == stop
    assert runs[0][0] == runs[0][2] == runs[0][4]


def test_a_second_engine_after_a_fault(model: TinyModel) -> None:
    """A failed engine leaves nothing in the process that another one could trip over."""
    with open_llm(model) as good:
        expected = tokens_of(good)
        with open_llm(model, check=ALWAYS) as bad:
            bad.engine.runner.model.weights.norm = bad.engine.runner.model.weights.norm.clone()
            with pytest.raises(StaleGraphError):
                tokens_of(bad)
        assert tokens_of(good) == expected
        with open_llm(model) as fresh:
            assert tokens_of(fresh) == expected
