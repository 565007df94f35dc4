"""After a step that could not be collected: every request has ended, once, and the engine says so and can be closed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM
from ostinato.errors import EngineDeadError
from ostinato.request import FinishReason
from ostinato.runner.runner import InFlight
from ostinato.step import StepResult

from .conftest import TinyFactory
from .connecting import disk, open_llm
from .driving import greedy
from .models import TinyModel, prompts_of

PROMPTS = prompts_of((40, 9, 20, 33, 12, 50), 160, seed=97)


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Llama")


OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 22}}


def break_at(llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str, at: int) -> None:
    """The call number `at` of a part's method raises."""
    engine, count = llm.engine, 0
    connector = llm._built.connector  # type: ignore[union-attr]
    parts: dict[str, Any] = {"collect": engine.runner, "update": engine.scheduler}
    owner = parts.get(where) or connector.worker  # type: ignore[union-attr]
    run = getattr(owner, where)

    def failing(*arguments: object) -> object:
        nonlocal count
        count += 1
        if count == at:
            raise RuntimeError("put in on purpose")
        return run(*arguments)

    monkeypatch.setattr(owner, where, failing)


@pytest.mark.parametrize(
    ("connector", "where"),
    [
        *(("none", where) for where in ("collect", "update")),
        *((name, where) for name in ("offloading", "disk") for where in ("collect", "update", "get_finished")),
    ],
)
def test_every_request_ends_and_nothing_stays_in_flight(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, connector: str, where: str
) -> None:
    """Running, with two steps in flight, and waiting."""
    transfer = {"none": None, "offloading": OFFLOADING, "disk": disk(tmp_path)}[connector]
    llm = open_llm(model.path, transfer, max_in_flight=2)
    engine = llm.engine
    states = [engine.add_request(f"r{number}", prompt, greedy(30)) for number, prompt in enumerate(PROMPTS)]
    break_at(llm, monkeypatch, where, 4)
    with pytest.raises(RuntimeError, match="put in on purpose"):
        while engine.has_unfinished:
            engine.step()
    assert engine.scheduler.num_steps_in_flight == 0
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (0, 0)
    assert not engine.has_unfinished and not engine.can_step
    for state in states:
        assert state.request.finish_reason is FinishReason.ERROR
        assert state.request.stop_reason == "the engine has failed: RuntimeError: put in on purpose"
    engine.scheduler.check_integrity()
    assert engine.scheduler.kv.num_free == llm.stats().num_blocks - 1
    assert str(engine.failure) == "the engine has failed: RuntimeError: put in on purpose"
    uses: tuple[Callable[[], object], ...] = (
        engine.step,
        lambda: llm.generate([PROMPTS[0]], greedy(2)),
        lambda: llm.sleep(),
        lambda: llm.wake_up(),
        lambda: llm.update_weights(()),
        lambda: llm.reload_weights(),
        lambda: llm.reconfigure(max_num_seqs=2),
    )
    for use in uses:
        with pytest.raises(EngineDeadError, match="the engine has failed: RuntimeError: put in on purpose"):
            use()
    llm.close()
    llm.close()


def test_streams_that_did_not_step_are_told_too(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(model.path, None) as llm:
        first, second = llm.stream(PROMPTS[0], greedy(30)), llm.stream(PROMPTS[1], greedy(30))
        break_at(llm, monkeypatch, "collect", 3)
        with pytest.raises(RuntimeError, match="put in on purpose"):
            list(first)
        with pytest.raises(EngineDeadError, match="put in on purpose"):
            list(second)


def test_a_fault_while_closing(model: TinyModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llm = open_llm(model.path, disk(tmp_path), max_in_flight=2)
    built = llm._built
    assert built is not None
    llm.engine.add_request("r", PROMPTS[0], greedy(30))
    while not llm.engine.scheduler.num_steps_in_flight:
        llm.engine.step()
    break_at(llm, monkeypatch, "collect", 1)
    with pytest.raises(RuntimeError, match="put in on purpose"):
        llm.close()
    worker: Any = built.connector and built.connector.worker
    assert not worker._writer.is_alive()
    assert len(built.engine.runner.store.available()) == 0
    llm.close()


def test_an_interrupted_collect_can_be_repeated(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(model.path, None, max_in_flight=2) as llm:
        state = llm.engine.add_request("r", PROMPTS[0], greedy(12))
        llm.engine.step()

        def interrupted(step: InFlight) -> StepResult:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(llm.engine.runner, "collect", interrupted)
            llm.engine.step()
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert state.request.output_token_ids == model.greedy(PROMPTS[0], 12)
