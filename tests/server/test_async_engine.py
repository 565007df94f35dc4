"""The engine behind an event loop, without HTTP: refusals, aborts, faults, draining."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from ostinato import LLM, CapacityError, ConfigError, SamplingParams
from ostinato.engine.async_engine import AsyncEngine
from ostinato.engine.status import EngineState
from ostinato.engine.stream import RequestStream, Submission
from ostinato.errors import EngineDeadError, QueueFullError, UnavailableError

from ..e2e.models import TinyModel
from .conftest import open_llm

T = TypeVar("T")


def one(name: str, max_tokens: int = 20, prompt: list[int] | None = None, **options: Any) -> Submission:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)
    return Submission(name, [5, 6, 7] if prompt is None else prompt, params)


def with_engine(model: TinyModel, use: Callable[[AsyncEngine], Awaitable[T]], *, max_queue: int = 9, **llm: Any) -> T:
    async def run() -> T:
        engine = AsyncEngine(lambda: open_llm(model, **llm), max_queue=max_queue)
        engine.start()
        await engine.ready()
        try:
            async with asyncio.timeout(60):
                return await use(engine)
        finally:
            assert await engine.close()

    return asyncio.run(run())


async def tokens(stream: RequestStream) -> list[int]:
    found: list[int] = []
    with stream:
        async for pieces in stream:
            found += [token for piece in pieces for token in piece.delta.token_ids]
    return found


async def free_blocks(engine: AsyncEngine) -> int:
    return await engine.call(lambda llm: llm.engine.scheduler.kv.num_free)


def test_streams_beside_each_other(model: TinyModel) -> None:
    async def use(engine: AsyncEngine) -> None:
        streams = [await engine.submit([one(f"r{index}", prompt=[index + 1] * 5)]) for index in range(5)]
        found = await asyncio.gather(*map(tokens, streams))
        assert found == [model.greedy([index + 1] * 5, 20) for index in range(5)]
        assert engine.num_open == 0
        assert engine.request_stats.finished["length"] == 5

    with_engine(model, use)


def test_a_refused_request_raises_to_its_caller_alone(model: TinyModel) -> None:
    """Of several in one call the good ones go with the bad one, and the ids are free again."""

    async def use(engine: AsyncEngine) -> None:
        running = await engine.submit([one("good", 30)])
        for bad, error in (
            (one("bad", prompt=[]), ConfigError),
            (one("bad", prompt=[999]), ConfigError),
            (one("bad", prompt=[1] * 200), ConfigError),
            (one("bad", stop_token_ids=[999]), ConfigError),
            (one("bad", 150, prompt=[1] * 50), CapacityError),
        ):
            with pytest.raises(error):
                await engine.submit([one("beside"), bad])
        assert engine.num_open == 1
        assert await tokens(running) == model.greedy([5, 6, 7], 30)
        assert await tokens(await engine.submit([one("bad"), one("beside", 1)]))
        assert await free_blocks(engine) == 9
        assert engine.request_stats.finished["abort"] == engine.request_stats.finished["error"] == 0

    with_engine(model, use, num_gpu_blocks_override=10)


def test_closing_a_stream_aborts(model: TinyModel) -> None:
    """By leaving it, by cancelling who waits for it, and while it is being submitted."""

    async def use(engine: AsyncEngine) -> None:
        everything = await free_blocks(engine)
        with await engine.submit([one("a", 150), one("b", 150)]) as stream:
            await anext(stream)
            assert await free_blocks(engine) < everything
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert engine.num_open == 0
        assert await free_blocks(engine) == everything

        gate = threading.Event()
        submitting = asyncio.create_task(engine.submit([one("c", 150)]))
        blocked = asyncio.create_task(engine.call(lambda llm: gate.wait(60)))
        consumer = asyncio.create_task(tokens(await submitting))
        await asyncio.sleep(0.01)
        consumer.cancel()
        await asyncio.wait([consumer])
        gate.set()
        assert await blocked
        assert engine.num_open == 0
        assert await free_blocks(engine) == everything

        gate = threading.Event()
        blocked = asyncio.create_task(engine.call(lambda llm: gate.wait(60)))
        await asyncio.sleep(0)
        submitting = asyncio.create_task(engine.submit([one("d", 150)]))
        await asyncio.sleep(0.01)
        assert engine.num_open == 1
        submitting.cancel()
        await asyncio.wait([submitting])
        gate.set()
        assert await blocked
        assert engine.num_open == 0
        assert await free_blocks(engine) == everything
        assert not await engine.call(lambda llm: llm.engine.has_unfinished)
        assert engine.request_stats.finished["abort"] == 4

    with_engine(model, use)


def test_the_queue_is_bounded(model: TinyModel) -> None:
    async def use(engine: AsyncEngine) -> None:
        streams = [await engine.submit([one(f"r{index}", 40)]) for index in range(3)]
        with pytest.raises(QueueFullError, match=r"3 requests are open.*1 run at once, 2 may wait"):
            await engine.submit([one("more")])
        assert engine.request_stats.num_refused == 1
        for stream in streams:
            assert len(await tokens(stream)) == 40
        assert len(await tokens(await engine.submit([one("more")]))) == 20

    with_engine(model, use, max_queue=2, max_num_seqs=1)


def test_a_fault_fails_all_that_is_open(model: TinyModel) -> None:
    """What came before the fault is still handed out; afterwards nothing is served, and everything says why."""

    async def use(engine: AsyncEngine) -> None:
        streams = [await engine.submit([one(f"r{index}", 150)]) for index in range(3)]
        await anext(streams[0])
        consumers = [asyncio.create_task(tokens(stream)) for stream in streams]

        def break_it(llm: LLM) -> None:
            def launch(plan: object) -> None:
                raise RuntimeError("the device is gone")

            llm.engine.runner.launch = launch  # type: ignore[method-assign, assignment]

        await engine.call(break_it)
        error = await engine.ended()
        assert isinstance(error, RuntimeError)
        for consumer in consumers:
            with pytest.raises(EngineDeadError, match="RuntimeError: the device is gone"):
                await consumer
        assert engine.state is EngineState.DEAD
        assert engine.num_open == 0
        assert engine.request_stats.finished["error"] == 3
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await engine.submit([one("late")])
        with pytest.raises(EngineDeadError):
            await engine.call(lambda llm: None)
        with pytest.raises(EngineDeadError):
            _ = engine.info
        await engine.idle()

    with_engine(model, use)


def test_a_call_that_was_waiting_when_the_engine_failed(model: TinyModel) -> None:
    async def use(engine: AsyncEngine) -> None:
        def fail(llm: LLM) -> None:
            raise SystemError("a fault of the thread itself")

        engine._thread.between_steps(fail)
        with pytest.raises(EngineDeadError, match="a fault of the thread itself"):
            await engine.call(lambda llm: 1)

    with_engine(model, use)


def test_what_a_call_raises_is_its_callers(model: TinyModel) -> None:
    async def use(engine: AsyncEngine) -> None:
        def fail(llm: LLM) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await engine.call(fail)
        assert engine.state is EngineState.RUNNING

    with_engine(model, use)


def test_draining(model: TinyModel) -> None:
    """What was accepted is served to its end, nothing new is taken."""

    async def use(engine: AsyncEngine) -> None:
        stream = await engine.submit([one("r", 60)])
        engine.begin_drain()
        with pytest.raises(UnavailableError, match="takes no new requests"):
            await engine.submit([one("late")])
        consumer = asyncio.create_task(tokens(stream))
        await engine.idle()
        assert await consumer == model.greedy([5, 6, 7], 60)
        assert await engine.call(lambda llm: llm.engine.has_unfinished) is False

    with_engine(model, use)


@pytest.mark.parametrize("first", ["sleep", "drain"])
def test_draining_asleep(model: TinyModel, first: str) -> None:
    """What was accepted cannot go on: it gets the tokens that it had coming, and an error."""

    async def use(engine: AsyncEngine) -> None:
        stream, seen = await engine.submit([one("r", 150), one("s", 150)]), list[int]()
        if first == "sleep":
            await engine.call(LLM.sleep)
            engine.begin_drain()
        else:
            engine.begin_drain()
            await engine.call(LLM.sleep)
        with pytest.raises(
            UnavailableError, match=r"shutting down while the engine sleeps \(no kv_cache, no weights\)"
        ):
            async for pieces in stream:
                seen += [token for piece in pieces if piece.answer == 0 for token in piece.delta.token_ids]
        await engine.idle()
        assert seen == model.greedy([5, 6, 7], len(seen))
        assert engine.request_stats.finished["error"] == 2
        assert await engine.call(lambda llm: llm.engine.has_unfinished) is False
        await engine.call(lambda llm: llm.engine.scheduler.check_integrity())

    with_engine(model, use)


def test_closing_ends_what_is_open(model: TinyModel) -> None:
    async def use(engine: AsyncEngine) -> None:
        consumer = asyncio.create_task(tokens(await engine.submit([one("r", 150)])))
        await asyncio.sleep(0)
        assert await engine.close()
        with pytest.raises(UnavailableError, match="has shut down"):
            await consumer
        with pytest.raises(UnavailableError, match="has shut down"):
            await engine.submit([one("late")])
        assert await engine.ended() is None

    with_engine(model, use)


def test_a_failed_start(model: TinyModel) -> None:
    async def run() -> None:
        engine = AsyncEngine(lambda: open_llm(model, max_model_len=100_000))
        engine.start()
        with pytest.raises(UnavailableError, match="starting"):
            await engine.submit([one("early")])
        with pytest.raises(ConfigError, match="100000"):
            await engine.ready()
        assert isinstance(await engine.ended(), ConfigError)
        assert engine.state is EngineState.DEAD
        with pytest.raises(EngineDeadError):
            await engine.submit([one("late")])
        assert await engine.close()

    asyncio.run(run())


def test_a_thread_that_hangs_is_left_behind(model: TinyModel) -> None:
    gate = threading.Event()

    async def use(engine: AsyncEngine) -> None:
        engine._thread.between_steps(lambda llm: gate.wait(60) and None)
        assert not await engine.close(timeout_s=0.05)
        gate.set()

    with_engine(model, use)
