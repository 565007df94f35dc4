"""`AsyncEngine`: the engine for an event loop. It never blocks the loop, and the loop never blocks it.

The engine lives on a thread of its own, and nothing of it is touched from anywhere else: requests, aborts and questions
go there through a queue and run between steps; the deltas of steps come back in batches (`deliveries.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ostinato.engine.deliveries import Deliveries
from ostinato.engine.engine_thread import EngineThread
from ostinato.engine.llm import LLM
from ostinato.engine.output import Delta, OutputState, join
from ostinato.engine.request_stats import RequestStats
from ostinato.engine.status import EngineInfo, EngineState, refusal
from ostinato.engine.step_log import StepLog
from ostinato.engine.stream import Member, Piece, RequestStream, Submission
from ostinato.errors import ConfigError, EngineDeadError, QueueFullError, UnavailableError
from ostinato.request import SamplingParams, StructuredOutputsParams, TokenGrammar
from ostinato.sampling.grammar import Grammar

T = TypeVar("T")

DEFAULT_MAX_QUEUE = 1024

NUM_COMPILERS = 2
"""Grammars compiled at once: one large schema does not hold up the next, and many do not take all cores."""

_ANY_GRAMMAR = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))


class AsyncEngine:
    """Use it from one event loop: `start`, await `ready`, then `submit`.

    `open_llm` makes the engine, on the engine's thread. `max_queue` requests may wait beyond the `max_num_seqs` that
    run. A request that cannot be served raises to its caller and harms nobody; whatever a step raises is a fault of the
    engine, which ends it and every open request with EngineDeadError.
    """

    def __init__(self, open_llm: Callable[[], LLM], *, max_queue: int = DEFAULT_MAX_QUEUE) -> None:
        self.state = EngineState.STARTING
        self.request_stats = RequestStats()
        self.step_log = StepLog()  # the engine's thread writes it: read it in a `call`
        self._max_queue = max_queue
        self._thread = EngineThread(
            open_llm, on_opened=self._opened, on_stepped=self._stepped, on_ended=self._thread_ended
        )
        self._info: EngineInfo | None = None
        self._compile: Callable[[SamplingParams], TokenGrammar | None] = lambda params: None
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, "ostinato-compile")
        self._num_compiling = 0
        self._failure: EngineDeadError | None = None
        self._members: dict[str, Member] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to make the engine. Needs a running event loop, which is then the engine's."""
        self._loop = asyncio.get_running_loop()
        self._deliveries = Deliveries(self._loop, self._on_stepped)
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._thread.start()

    async def ready(self) -> None:
        """Returns when requests can be served. Raises what making the engine raised."""
        await asyncio.shield(self._ready)

    async def ended(self) -> BaseException | None:
        """Waits until the engine's thread is done; returns what it failed with, None if it was closed."""
        return await asyncio.shield(self._ended)

    def begin_drain(self) -> None:
        """Takes no new requests; those that were submitted go on to their ends. Where the engine sleeps they cannot,
        and nobody has to come who wakes it: they end with UnavailableError."""
        if self.state in (EngineState.STARTING, EngineState.RUNNING):
            self.state = EngineState.DRAINING
            self._thread.between_steps(self._end_stranded)

    async def idle(self) -> None:
        """Waits until no request is open."""
        await self._idle.wait()

    async def close(self, timeout_s: float | None = None) -> bool:
        """Ends open requests with UnavailableError and waits until the engine is gone, for `timeout_s` at most.

        Returns whether it is: a long step, or making the engine, is not interrupted.
        """
        if self.state is not EngineState.DEAD:
            self.state = EngineState.CLOSED
        self._fail_all(self._refusal())
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._thread.stop()
        return await asyncio.to_thread(self._thread.join, timeout_s)

    # -- requests ----------------------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """Raises UnavailableError before the engine is ready and EngineDeadError after it has failed."""
        if self._info is None or self._failure is not None:
            raise self._refusal()
        return self._info

    @property
    def num_open(self) -> int:
        """Requests that wait or run, each of several answers counted."""
        return len(self._members)

    def check_room(self, count: int = 1) -> None:
        """Raises what `submit` would raise now for `count` submissions, for whatever they ask."""
        if self.state is not EngineState.RUNNING:
            raise self._refusal()
        most = self.info.stats.max_num_seqs + self._max_queue
        if count > most:
            raise ConfigError(f"{count} answers in one call: at most {most} can run and wait", field="n")
        num_open = len(self._members) + self._num_compiling
        if num_open + count > most:
            self.request_stats.num_refused += 1
            raise QueueFullError(
                f"{num_open} requests are open and {count} more would make more than {most} "
                f"({self.info.stats.max_num_seqs} run at once, {self._max_queue} may wait): try again later"
            )

    async def compile_grammars(self, params: SamplingParams, count: int) -> list[TokenGrammar | None]:
        """One for each of `count` submissions, None where `params` has no `structured_outputs`.

        It takes up to seconds of work, on a thread that is neither the loop's nor the engine's. Raises ConfigError for
        a malformed structure, and what `submit` raises while the engine does not serve.
        """
        if params.structured_outputs is None:
            return [None] * count
        self.check_room(count)
        self._num_compiling += count
        try:
            first = await self._loop.run_in_executor(self._compilers, self._compile, params)
        except asyncio.CancelledError:
            if self.state is EngineState.CLOSED:  # `close` has cancelled it, and nobody the caller
                raise self._refusal() from None
            raise
        finally:
            self._num_compiling -= count
        assert isinstance(first, Grammar)
        return [first, *(first.copy() for _ in range(count - 1))]

    async def submit(self, submissions: Sequence[Submission], *, arrived_at_s: float | None = None) -> RequestStream:
        """Queues all of them or none. Use the stream as a context manager; whoever drops it leaves them running.

        `arrived_at_s`, of `time.perf_counter`, is when the call came in, now by default. Raises ConfigError or
        CapacityError for one that can never be served, QueueFullError when too many wait, UnavailableError when the
        engine does not serve. Ids must be new.
        """
        self.check_room(len(submissions))
        assert not any(one.request_id in self._members for one in submissions), "request ids are made to be unique"
        arrived = time.perf_counter() if arrived_at_s is None else arrived_at_s
        stream = RequestStream(tuple(one.request_id for one in submissions), self._abort)
        for index, one in enumerate(submissions):
            self._members[one.request_id] = Member(stream, index, len(one.prompt_token_ids), arrived)
        self._idle.clear()
        try:
            stream.outputs = await self.call(lambda llm: _add_all(llm, submissions))
        except asyncio.CancelledError:
            stream.close()
            raise
        except Exception:
            self._forget(stream)
            raise
        return stream

    async def call(self, function: Callable[[LLM], T]) -> T:
        """What `function` returns or raises when the engine's thread runs it between two steps."""
        if self._info is None or self.state in (EngineState.DEAD, EngineState.CLOSED):
            raise self._refusal()
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def command(llm: LLM) -> None:
            try:
                result = function(llm)
            except Exception as error:
                self._post(_set_exception, future, error)
            else:
                self._post(_set_result, future, result)

        self._thread.between_steps(command)
        if self.state is EngineState.DRAINING:
            self._thread.between_steps(self._end_stranded)  # it may have put the engine to sleep
        return await future

    # -- the engine's thread tells -----------------------------------------------------------------------------------

    def _opened(self, llm: LLM) -> None:
        llm.engine.runner.observe(self.step_log)
        self._compile = llm.engine.compile_grammar
        with contextlib.suppress(ConfigError):  # this model has no structured outputs: who asks for one is told
            # now, because the first grammar of all holds Python's lock for up to a second: nothing else would run
            self._compile(_ANY_GRAMMAR)
        self._post(self._on_opened, EngineInfo(llm.tokenizer, llm.stats()))

    def _stepped(self, deltas: Sequence[Delta], at_s: float) -> None:
        self._deliveries.put((deltas, at_s))

    def _thread_ended(self, error: BaseException | None) -> None:
        self._post(self._on_ended, error)

    def _end_stranded(self, llm: LLM) -> None:
        """While the server drains: what waits for something that is not there."""
        engine = llm.engine
        if not engine.missing:
            return
        while engine.can_step:  # tokens of steps that were collected before
            self._stepped(engine.step(), time.perf_counter())
        stranded = [request.request_id for request in engine.scheduler.unfinished()]
        _abort_all(llm, stranded)
        self._post(
            self._on_stranded,
            stranded,
            UnavailableError(
                f"the server is shutting down while the engine sleeps (no {', no '.join(engine.missing)}): the request "
                "cannot go on"
            ),
        )

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(callback, *args)

    # -- inside, on the loop -----------------------------------------------------------------------------------------

    def _on_opened(self, info: EngineInfo) -> None:
        self._info = info
        if self.state is EngineState.STARTING:
            self.state = EngineState.RUNNING
        self._ready.set_result(None)

    def _on_stepped(self, steps: Sequence[tuple[Sequence[Delta], float]]) -> None:
        """Each answer is told once, of all that the steps gave it."""
        stats, members = self.request_stats, self._members
        touched: list[Member] = []
        for deltas, at_s in steps:
            gaps: dict[float, int] = {}  # rows that were in the same steps have the same ones
            for delta in deltas:
                member = members.get(delta.request_id)
                if member is None:  # aborted since
                    continue
                if delta.token_ids:  # none in what ends an answer that the engine gave up
                    if member.last_token_s is None:
                        stats.num_prompt_tokens += member.num_prompt_tokens
                        stats.ttft_s.observe(at_s - member.arrived_at_s)
                    else:
                        gap = at_s - member.last_token_s
                        gaps[gap] = gaps.get(gap, 0) + 1
                    member.last_token_s = at_s
                if delta.finished:
                    del members[delta.request_id]
                    stats.finished[delta.finish_reason or "stop"] += 1
                    stats.e2e_s.observe(at_s - member.arrived_at_s)
                if not member.delivered:
                    touched.append(member)
                member.delivered.append(delta)
            for gap, count in gaps.items():
                stats.inter_token_s.observe(gap, count)
        for member in touched:
            delta, member.delivered = join(member.delivered), []
            stats.num_generated_tokens += len(delta.token_ids)
            member.stream.push(Piece(member.answer, delta))
        if not self._members:
            self._idle.set()

    def _on_stranded(self, request_ids: Sequence[str], error: UnavailableError) -> None:
        self._deliveries.flush()
        found = [member for name in request_ids if (member := self._members.pop(name, None)) is not None]
        self.request_stats.finished["error"] += len(found)
        for member in found:
            member.stream.fail(error)
        if not self._members:
            self._idle.set()

    def _on_ended(self, error: BaseException | None) -> None:
        self._deliveries.flush()
        if error is not None:
            self.state = EngineState.DEAD
            self._failure = EngineDeadError(f"the engine has failed: {type(error).__name__}: {error}")
            self._failure.__cause__ = error
        if not self._ready.done():
            self._ready.set_exception(error or self._refusal())
            self._ready.exception()  # a caller that does not wait for it is not warned
        self._fail_all(self._refusal())
        for future in tuple(self._calls):
            _set_exception(future, self._refusal())
        self._ended.set_result(error)

    def _refusal(self) -> UnavailableError:
        return self._failure or refusal(self.state)

    def _fail_all(self, error: UnavailableError) -> None:
        members, self._members = self._members, {}
        self.request_stats.finished["error"] += len(members)
        for member in members.values():
            member.stream.fail(error)
        self._idle.set()

    def _abort(self, stream: RequestStream) -> None:
        """The ids are free again for the engine's next command."""
        dropped = self._forget(stream)
        self.request_stats.finished["abort"] += len(dropped)
        if dropped:
            self._thread.between_steps(lambda llm: _abort_all(llm, dropped))

    def _forget(self, stream: RequestStream) -> list[str]:
        """No more of what the engine makes of these requests is listened to. Returns those that were open."""
        found = [request_id for request_id in stream.request_ids if self._members.pop(request_id, None) is not None]
        if not self._members:
            self._idle.set()
        return found


def _add_all(llm: LLM, submissions: Sequence[Submission]) -> tuple[OutputState, ...]:
    added: list[OutputState] = []
    try:
        for one in submissions:
            added.append(
                llm.engine.add_request(
                    one.request_id, one.prompt_token_ids, one.params, priority=one.priority, grammar=one.grammar
                )
            )
    except BaseException:
        for output in added:
            llm.engine.abort(output.request.request_id)
        raise
    return tuple(added)


def _abort_all(llm: LLM, request_ids: Sequence[str]) -> None:
    for request_id in request_ids:
        llm.engine.abort(request_id)


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
