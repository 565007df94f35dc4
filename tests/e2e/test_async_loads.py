"""Loads that no step waits for, on the tape backend: running requests go on, and what comes is what would have been
computed, whatever happens to the engine or the request meanwhile."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, ConfigError
from ostinato.connectors.mover import BlockMover
from ostinato.engine import engine as engine_module
from ostinato.engine.async_engine import AsyncEngine
from ostinato.engine.output import OutputState
from ostinato.engine.stream import RequestStream, Submission
from ostinato.errors import ConnectorError
from ostinato.kernels import ops
from ostinato.request import FinishReason, RequestStatus
from ostinato.scheduler import scheduler as scheduler_module

from .conftest import TinyFactory
from .connecting import disk, open_llm, stats_of, tokens_of
from .driving import ALWAYS, greedy, launches
from .models import TinyModel, prompts_of

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
LONG = prompts_of((70, 90, 80, 75), 160, seed=80)
OTHERS = prompts_of((5, 9), 160, seed=82)
PROMPT = LONG[0]


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Qwen3", num_hidden_layers=3)


def offloading(load: str = "async", host_bytes: int = 1 << 24, **extra: Any) -> dict[str, Any]:
    options = {"cpu_bytes_to_use": host_bytes, "load": load, **extra}
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": options}


@contextmanager
def opened(model: TinyModel, load: str = "async", **options: Any) -> Iterator[LLM]:
    """Host memory has all blocks of PROMPT, the pool none."""
    with open_llm(model.path, offloading(load), num_gpu_blocks_override=14, check=ALWAYS, **options) as llm:
        for prompt in LONG:
            llm.generate(prompt, greedy(3))
        assert stats_of(llm).async_loads == 0
        yield llm


@contextmanager
def late(llm: LLM, polls: int) -> Iterator[Callable[[], None]]:
    """Asynchronous copies into the pool begin at the poll of that number after they should have begun, or when
    what this gives is called."""
    worker = llm.engine.runner._connector
    assert isinstance(worker, BlockMover)
    lanes, waiting = worker._lanes, list[list[Any]]()
    start, finished = lanes.start_async, lanes.finished

    def start_late(number: int, saves: Any, loads: Any) -> None:
        if saves is not None:
            saves(0, worker._num_layers)
        waiting.append([polls, number, loads])

    def finished_late() -> list[object]:
        for entry in waiting:
            entry[0] -= 1
        while waiting and waiting[0][0] <= 0:
            _, number, loads = waiting.pop(0)
            start(number, None, loads)
        return finished()

    def begin() -> None:
        while waiting:
            _, number, loads = waiting.pop(0)
            start(number, None, loads)

    lanes.start_async, lanes.finished = start_late, finished_late  # type: ignore[method-assign]
    try:
        yield begin
    finally:
        begin()
        lanes.start_async, lanes.finished = start, finished  # type: ignore[method-assign]


def decode(llm: LLM, count: int = 20) -> list[OutputState]:
    """Requests past their prompts."""
    states = [llm.engine.add_request(f"o{i}", other, greedy(count)) for i, other in enumerate(OTHERS)]
    while min(state.num_tokens for state in states) < 2:
        llm.engine.step()
    return states


def arrive(llm: LLM, name: str = "late") -> OutputState:
    """It loads."""
    state = llm.engine.add_request(name, PROMPT, greedy(6))
    llm.engine.step()
    assert state.request.status is LOADING
    return state


def finish(llm: LLM, model: TinyModel, *states: OutputState) -> None:
    """Every token is as it would be alone, and nothing is left behind."""
    while llm.engine.has_unfinished:
        llm.engine.step()
    for state in states:
        tokens = state.request.output_token_ids
        assert tokens == model.greedy(list(state.request.prompt_token_ids), len(tokens)) and tokens
    llm.engine.settle()
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.kv.num_free == llm.engine.scheduler.kv.num_allocatable


@pytest.mark.parametrize("wait", ["events", "hooks", "step"])
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_steps_go_on_without_it(model: TinyModel, mode: str, wait: str) -> None:
    """Every step has all decoding rows and runs as ever; only steps that begin when the load is there have the row."""
    transfer = offloading("async", wait=wait)
    with open_llm(
        model.path, transfer, num_gpu_blocks_override=14, check=ALWAYS, cudagraph_mode=mode, max_in_flight=2
    ) as llm:
        for prompt in LONG:
            llm.generate(prompt, greedy(3))
        states = decode(llm)
        with late(llm, polls=5), launches(llm) as launched:
            state = arrive(llm)
            while state.request.status is LOADING:
                llm.engine.step()
        alone = [step for step in launched if step.plan.num_rows == 2]
        assert len(alone) >= 5
        assert all([row.num_tokens for row in step.plan.rows][:2] == [1, 1] for step in launched)
        assert all(step.decision.reason.value != "needs host work" for step in launched)
        finish(llm, model, state, *states)
        assert state.request.num_cached_tokens == 64
        assert stats_of(llm).async_loads == 1 and stats_of(llm).failed_loads == 0


def test_room_for_a_load_is_no_step_s_matter(model: TinyModel) -> None:
    """Blocks that the load takes are saved with it, not by the step beside it; what they held comes back."""
    with opened(model) as llm, late(llm, polls=5), launches(llm) as launched:
        states = decode(llm)
        before = len(launched)
        state = arrive(llm)
        metas: list[Any] = [step.plan.connector_meta for step in launched[before:]]
        (meta,) = [meta for meta in metas if meta is not None]
        (load,) = meta.async_loads
        assert len(load.copies) == 4 and len(load.saves) >= 4 and not meta.saves and not meta.loads
        assert {copy.block_id for copy in load.saves} <= set(llm.engine.scheduler.kv.table("late"))
        while state.request.status is LOADING:
            llm.engine.step()
        finish(llm, model, state, *states)
        for prompt in reversed(LONG):
            assert tokens_of(llm, prompt) == model.greedy(prompt, 5)


def test_what_makes_room_is_loaded_by_the_same_step(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request's load takes blocks that the next one, in the same plan, loads back: not before they are saved."""
    monkeypatch.setattr(scheduler_module, "MIN_ASYNC_TOKENS", 64)
    with opened(model, "auto") as llm:
        states = decode(llm)
        original = ops.copy_blocks

        def copy_late(source: Any, target: Any, *arguments: Any) -> None:
            if source.data_ptr() == llm.engine.runner.storage.pool.data_ptr():
                time.sleep(0.1)
            original(source, target, *arguments)

        monkeypatch.setattr(ops, "copy_blocks", copy_late)
        late_one = llm.engine.add_request("late", PROMPT, greedy(6))
        small = llm.engine.add_request("small", LONG[1][:33], greedy(2))
        with launches(llm) as launched:
            llm.engine.step()
        meta: Any = launched[0].plan.connector_meta
        saved = {copy.host for load in meta.async_loads for copy in load.saves}
        assert len(meta.loads) == 2 and {copy.host for copy in meta.loads} <= saved
        finish(llm, model, late_one, small, *states)


def test_auto_chooses_by_what_runs(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(model, "auto") as llm:
        assert tokens_of(llm, PROMPT) == model.greedy(PROMPT, 5)
        assert stats_of(llm).loaded_blocks == 4 and stats_of(llm).async_loads == 0
        for prompt in LONG[1:]:
            llm.generate(prompt, greedy(3))
        loads = stats_of(llm).async_loads
        monkeypatch.setattr(scheduler_module, "MIN_ASYNC_TOKENS", 64)
        states = decode(llm)
        state = arrive(llm)
        finish(llm, model, state, *states)
        assert stats_of(llm).async_loads == loads + 1


def test_sync_never_does(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MIN_ASYNC_TOKENS", 16)
    with opened(model, "sync") as llm:
        states = decode(llm)
        state = llm.engine.add_request("late", PROMPT, greedy(6))
        llm.engine.step()
        assert state.request.status is RequestStatus.RUNNING
        finish(llm, model, state, *states)
        assert stats_of(llm).async_loads == 0


def test_only_loads(model: TinyModel) -> None:
    """Nothing else to do: the engine waits, is not done, and does not spin."""
    with opened(model) as llm, late(llm, polls=10):
        state = llm.engine.add_request("a", PROMPT, greedy(6))
        num_steps = 0
        while state.num_tokens == 0:
            assert llm.engine.has_unfinished and llm.engine.can_step and not llm.engine.idle()
            llm.engine.step()
            num_steps += 1
        assert 10 <= num_steps < 10_000
        finish(llm, model, state)
        expected = [model.greedy(prompt, 5) for prompt in LONG]
        assert [list(out.outputs[0].token_ids) for out in llm.generate(LONG, greedy(5))] == expected
        assert stats_of(llm).async_loads >= 2


def test_an_abort_leaves_the_blocks_to_the_copies(model: TinyModel) -> None:
    with opened(model) as llm, late(llm, polls=8):
        states = decode(llm)
        arrive(llm)
        free = llm.engine.scheduler.kv.num_free
        llm.engine.abort("late")
        assert llm.engine.scheduler.kv.num_free == free and llm.engine.scheduler.is_loading
        again = llm.engine.add_request("late", PROMPT, greedy(6))
        finish(llm, model, again, *states)


def test_an_abort_of_all_there_is(model: TinyModel) -> None:
    """Nobody steps any more; whoever looks or settles finds the blocks free in the end."""
    with opened(model) as llm, late(llm, polls=3):
        arrive(llm)
        llm.engine.abort("late")
        assert not llm.engine.has_unfinished
        assert llm.stats().free_blocks < llm.stats().num_blocks - 1
        finish(llm, model)


def test_closing_waits_for_the_copies(model: TinyModel) -> None:
    with opened(model) as llm, late(llm, polls=3):
        decode(llm)
        arrive(llm)
        llm.close()


def sleep_1(llm: LLM, other: TinyModel) -> None:
    llm.sleep(1)
    llm.wake_up()


def sleep_2(llm: LLM, other: TinyModel) -> None:
    llm.sleep(2)
    llm.wake_up()


def same_weights(llm: LLM, other: TinyModel) -> None:
    llm.reload_weights()


def other_weights(llm: LLM, other: TinyModel) -> None:
    from ostinato.weights.checkpoint import open_checkpoint

    llm.update_weights(open_checkpoint(str(other.path)).tensors())


def fewer_rows(llm: LLM, other: TinyModel) -> None:
    llm.reconfigure(max_num_seqs=2)


def other_mode(llm: LLM, other: TinyModel) -> None:
    llm.reconfigure(cudagraph_mode="PIECEWISE")


@pytest.mark.parametrize("change", [sleep_1, sleep_2, same_weights, fewer_rows, other_mode])
def test_a_change_between_steps(model: TinyModel, change: Callable[[LLM, TinyModel], None]) -> None:
    with opened(model) as llm, late(llm, polls=4):
        states = decode(llm)
        state = arrive(llm)
        change(llm, model)
        assert not llm.engine.scheduler.is_loading
        finish(llm, model, state, *states)


def test_other_weights_while_it_loads(model: TinyModel, tiny_model: TinyFactory) -> None:
    """What was loaded is of the old ones."""
    other = tiny_model("Qwen3", num_hidden_layers=3, seed=1)
    with opened(model) as llm, late(llm, polls=4):
        state = arrive(llm)
        other_weights(llm, other)
        finish(llm, other, state)
        assert tokens_of(llm, PROMPT) == other.greedy(PROMPT, 5)


def test_copies_that_fail_are_computed(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(model) as llm:
        states = decode(llm)
        original = ops.copy_blocks

        def fail(source: Any, target: Any, *arguments: Any) -> None:
            worker: Any = llm.engine.runner._connector
            if target is worker._pool:
                raise RuntimeError("put in on purpose")
            original(source, target, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(ops, "copy_blocks", fail)
            state = arrive(llm)
            finish(llm, model, state, *states)
        assert state.request.num_cached_tokens == 0
        assert stats_of(llm).failed_loads == 1
        assert tokens_of(llm, PROMPT) == model.greedy(PROMPT, 5)


@pytest.mark.parametrize("begun", [False, True])
def test_a_step_that_fails_beside_it(model: TinyModel, monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    """Its rows fail. Whether the load was begun is unknown to all but the worker, so nothing of it counts."""
    with opened(model) as llm, late(llm, polls=4):
        decode(llm)
        worker: Any = llm.engine.runner._connector
        original = worker.start_load_kv

        def fail(meta: object) -> None:
            if begun:
                original(meta)
            raise RuntimeError("put in on purpose")

        state = llm.engine.add_request("late", PROMPT, greedy(6))
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="put in on purpose"):
            patch.setattr(worker, "start_load_kv", fail)
            llm.engine.step()
        assert state.request.status is LOADING
        finish(llm, model, state)
        assert state.request.num_cached_tokens == 0


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_full_block_and_a_token(model: TinyModel, load: str) -> None:
    """What is loaded is found from then on, though the request ends with its only row of one token."""
    prompt = prompts_of((65,), 160, seed=81)[0]
    with open_llm(model.path, offloading(load), num_gpu_blocks_override=14) as llm:
        for other in (prompt, *LONG):
            llm.generate(other, greedy(1))
        for _ in range(2):
            assert llm.generate(prompt, greedy(1))[0].num_cached_tokens == 64
        assert stats_of(llm).loaded_blocks == 4


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("load", ["auto", "async"])
def test_many_requests_over_little_memory(
    model: TinyModel, load: str, max_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared beginnings, preemption, aborts, a host memory that forgets: every token is as without any of it."""
    monkeypatch.setattr(scheduler_module, "MIN_ASYNC_TOKENS", 32)
    chance = random.Random(f"{load} {max_in_flight}")
    heads = prompts_of((48, 32, 64, 80, 48, 64), 160, seed=83)
    tails = prompts_of([chance.randint(1, 20) for _ in range(40)], 160, seed=84)
    prompts = [[*heads[chance.randrange(6)], *tail] for tail in tails]
    with open_llm(model.path, offloading(load, 400_000), max_in_flight=max_in_flight) as llm, late(llm, polls=3):
        states: list[OutputState] = []
        while len(states) < len(prompts) or llm.engine.has_unfinished:
            while len(states) < len(prompts) and llm.engine.scheduler.num_waiting < 2:
                count = chance.randint(1, 20)
                states.append(llm.engine.add_request(f"r{len(states)}", prompts[len(states)], greedy(count)))
                if chance.random() < 0.15:
                    llm.engine.abort(f"r{chance.randrange(len(states))}")
            llm.engine.step()
        assert stats_of(llm).async_loads > 5
        finish(llm, model, *(state for state in states if state.request.output_token_ids))


def test_from_disk(model: TinyModel, tmp_path: Path) -> None:
    """First the files are waited for, then the copies; a damaged one ends what is loaded."""
    with open_llm(model.path, disk(tmp_path)) as llm:
        assert tokens_of(llm, PROMPT) == model.greedy(PROMPT, 5)
    with open_llm(model.path, disk(tmp_path, load="async"), check=ALWAYS) as llm:
        states = decode(llm)
        state = llm.engine.add_request("late", PROMPT, greedy(6))
        finish(llm, model, state, *states)
        assert state.request.num_cached_tokens == 64
        assert (stats_of(llm).async_loads, stats_of(llm).failed_loads) == (1, 0)


def test_behind_an_event_loop(model: TinyModel) -> None:
    """Requests that only load, one that leaves meanwhile, and an end with copies under way."""

    async def read(stream: RequestStream) -> list[int]:
        with stream:
            return [token async for pieces in stream for piece in pieces for token in piece.delta.token_ids]

    async def use() -> None:
        engine = AsyncEngine(
            lambda: open_llm(model.path, offloading(), num_gpu_blocks_override=14, check=ALWAYS), max_queue=9
        )
        engine.start()
        await engine.ready()
        async with asyncio.timeout(120):
            for number, prompt in enumerate(LONG):
                await read(await engine.submit([Submission(f"p{number}", prompt, greedy(3))]))
            context = await engine.call(lambda llm: late(llm, polls=20))
            await engine.call(lambda llm: context.__enter__())
            leaving = await engine.submit([Submission("leaving", LONG[1], greedy(3))])
            stream = await engine.submit([Submission("late", PROMPT, greedy(6))])
            leaving.close()
            assert await read(stream) == model.greedy(PROMPT, 6)
            await engine.call(lambda llm: llm.engine.settle())
            assert await engine.call(lambda llm: llm.stats().free_blocks) == 13
            again = await engine.submit([Submission("again", LONG[2], greedy(3))])
            assert (await engine.call(lambda llm: stats_of(llm).async_loads)) >= 1
            again.close()
            assert await engine.close()

    asyncio.run(use())


def test_what_load_may_be(model: TinyModel) -> None:
    for wrong in ("later", True, []):
        with pytest.raises(ConfigError, match=r"load=.*: must be auto, sync, async"):
            open_llm(model.path, offloading(load=wrong))  # type: ignore[arg-type]


UNREPORTED = "OffloadingConnector has not reported the end of its load for request 'late'"


def test_a_load_that_is_never_reported_ends_its_request_alone(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are nobody's until it is reported after all."""
    with opened(model) as llm, late(llm, 10**9) as begin:
        engine, others = llm.engine, decode(llm)
        state = arrive(llm)
        blocks = set(engine.scheduler.kv.table("late"))
        monkeypatch.setattr(engine_module, "ASYNC_LOAD_TIMEOUT_S", 0.0)
        seen = [delta for delta in engine.step() if delta.request_id == "late"]
        while engine.has_unfinished:
            seen += [delta for delta in engine.step() if delta.request_id == "late"]
        [delta] = seen
        assert (delta.finished, delta.finish_reason, delta.token_ids) == (True, "error", ())
        assert UNREPORTED in str(delta.stop_reason)
        assert state.request.finish_reason is FinishReason.ERROR
        assert [other.request.output_token_ids for other in others] == [model.greedy(p, 20) for p in OTHERS]
        for number, prompt in enumerate(prompts_of((70, 75, 80), 160, seed=98)):  # the pool is turned over
            again = engine.add_request(f"again{number}", prompt, greedy(3))
            while not again.request.finished:
                engine.step()
                assert not blocks & set(engine.scheduler.kv.table(f"again{number}"))
            assert again.request.output_token_ids == model.greedy(prompt, 3)
        engine.scheduler.check_integrity()
        assert engine.scheduler.kv.num_free == engine.scheduler.kv.num_allocatable - len(blocks)
        monkeypatch.undo()
        begin()
        finish(llm, model)


@pytest.mark.parametrize("what", ["sleep", "update_weights", "settle"])
def test_nothing_that_takes_memory_goes_on_beside_such_a_load(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with opened(model) as llm:
        with late(llm, 10**9):
            arrive(llm)
            with monkeypatch.context() as patch, pytest.raises(ConnectorError, match=UNREPORTED):
                patch.setattr(engine_module, "ASYNC_LOAD_TIMEOUT_S", 0.0)
                {"sleep": llm.sleep, "update_weights": lambda: llm.update_weights([]), "settle": llm.engine.settle}[
                    what
                ]()
            assert not llm.is_sleeping()
        llm.sleep()
        llm.wake_up()
        finish(llm, model)


def test_what_waits_for_the_blocks_of_such_a_load(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(model) as llm, late(llm, 10**9):
        arrive(llm)
        engine = llm.engine
        engine.add_request("late too", LONG[1], greedy(6))
        engine.step()
        assert engine.scheduler.num_loading == 2
        waits = engine.add_request("waits", prompts_of((60,), 160, seed=99)[0], greedy(3))
        engine.step()
        assert waits.num_tokens == 0
        monkeypatch.setattr(engine_module, "ASYNC_LOAD_TIMEOUT_S", 0.0)
        while engine.has_unfinished:
            engine.step()
        assert waits.request.finish_reason is FinishReason.ERROR
        assert "there are not enough KV blocks: OffloadingConnector has not reported" in str(waits.request.stop_reason)
        monkeypatch.undo()
