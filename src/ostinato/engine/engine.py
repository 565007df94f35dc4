"""The step loop: plan, launch, collect, update. Up to `max_in_flight` steps run ahead of what has been collected."""

from __future__ import annotations

import logging
import time
from collections import deque

from ostinato.connectors.protocol import KVConnector
from ostinato.engine.output import Delta, OutputState
from ostinato.errors import CapacityError, ConfigError, ConnectorError, EngineDeadError, UnavailableError
from ostinato.request import MAX_STOP_IDS, FinishReason, Request, SamplingParams, TokenGrammar
from ostinato.runner.runner import InFlight, Runner
from ostinato.sampling.grammar import GrammarCompiler
from ostinato.scheduler import Scheduler
from ostinato.scheduler.scheduler import TokenEvent
from ostinato.step import StepPlan
from ostinato.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("ostinato")

CONNECTOR_WAIT_S = 0.01
"""For how long a step waits at most when all there is to run waits for KV from a connector. A new request waits too."""

LOAD_POLL_S = 0.0005
"""Between two looks at asynchronous loads when there is no step to wait for."""

ASYNC_LOAD_TIMEOUT_S = 300.0
"""How long an asynchronous load may go unreported: longer than the KV of a long prompt takes over a slow network
(16 GiB at 1 Gbit/s: 140 s), and not for ever."""

DROPPED_LOAD_TIMEOUT_S = 30.0
"""How long the loads of a step that was not launched may take to end. All wait for that, so it is no longer than copies
from host memory need."""

RECORDING_SHARE = 0.05
"""Of the time while requests run, what may go into recording keys that were put off."""


_new_tuple = tuple.__new__
"""Of a named tuple, without the Python function in between: every token makes one."""


class Engine:
    """Requests in, deltas out, one thread. `vocab_size` bounds the ids that a prompt may hold."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None,
        grammars: GrammarCompiler | None,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        max_in_flight: int,
        connector: KVConnector | None,
        seed: int,
    ) -> None:
        self.scheduler, self.runner, self.tokenizer, self._grammars = scheduler, runner, tokenizer, grammars
        self.eos_token_ids, self.vocab_size = eos_token_ids, vocab_size
        self._max_in_flight, self._connector, self._seed = max_in_flight, connector, seed
        self._in_flight: deque[InFlight] = deque()
        self._outputs: dict[str, OutputState] = {}
        self._num_requests = 0
        self._settled: list[Delta] = []  # of steps that `settle` collected, for the next `step` to return
        self._missing: dict[str, str] = {}  # what a step would need and is not there: why
        self._record_again_at = 0.0
        self.failure: EngineDeadError | None = None
        """After a fault, for good: a step that was launched could not be collected, so what the device holds is not
        known. Every request has ended with it, and no step runs any more."""

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._in_flight) or bool(self._settled)

    @property
    def can_step(self) -> bool:
        """Whether `step` has something to do, and all that it needs."""
        return self.has_unfinished and (not self._missing or bool(self._settled))

    def compile_grammar(self, params: SamplingParams) -> TokenGrammar | None:
        """What `add_request` does for `structured_outputs` where no grammar is given: up to a second of work, which any
        thread may do. A grammar is for one request. Raises ConfigError."""
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise ConfigError("structured outputs need a tokenizer; this model has none", field="structured_outputs")
        return self._grammars.compile(params.structured_outputs)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        grammar: TokenGrammar | None = None,
    ) -> OutputState:
        """Queues a request. Raises ConfigError or CapacityError, with the numbers, for one that can never be served."""
        if request_id in self._outputs:
            raise ConfigError(f"request id {request_id!r} is already running")
        self._require_all()
        self._check_prompt(prompt_token_ids)
        self._check_params(params)
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        number = self._num_requests
        request = Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            stop_token_ids=eos | frozenset(params.stop_token_ids or ()),
            seed=_mix(self._seed, number) if params.seed is None else params.seed,
            priority=priority,
            arrival=number,
            grammar=self.compile_grammar(params) if grammar is None else grammar,
        )
        output = OutputState(request, self.tokenizer)
        self.scheduler.add(request)
        self._num_requests += 1
        self._outputs[request_id] = output
        return output

    def abort(self, request_id: str) -> None:
        """Ends a request now; its steps in flight are discarded when collected. Unknown ids are ignored."""
        if self._outputs.pop(request_id, None) is not None:
            self.scheduler.abort(request_id)

    def step(self) -> list[Delta]:
        """Launches what may be launched, then collects the oldest step. Empty when that step gave nobody a token.

        Raises UnavailableError while the engine sleeps, and EngineDeadError after a fault. A step that cannot be
        collected is one: what it raised is raised, once.
        """
        self.require_alive()
        if self._settled:
            return self._take_settled()
        if self.scheduler.has_unfinished:
            self._require_all()
        if self.runner.num_pending:
            self._record_under_load()
        if self.scheduler.is_loading:
            self._fail_overdue()
        while len(self._in_flight) < self._max_in_flight:
            plan = self.scheduler.plan()
            if plan is None:
                if self.scheduler.is_loading:
                    self._transfer_without_a_step()
                break
            self._in_flight.append(self._launch(plan))
        if not self._in_flight:
            if self.scheduler.is_loading:
                self._wait_for_loads()
                self._fail_if_stuck()
            elif self._connector is not None and self.scheduler.num_deferred:
                self._connector.scheduler.wait_for_change(CONNECTOR_WAIT_S)
                self.poll_connector()
            elif self.scheduler.has_unfinished:
                raise CapacityError(
                    "requests wait, nothing runs and nothing can be planned: a defect, please report it"
                )
            return self._take_settled()
        return [*self._take_settled(), *self._collect()]

    def settle(self) -> None:
        """Collects every launched step and waits for every asynchronous load, so that nothing is in flight. The next
        `step` returns what the steps gave.

        Raises ConnectorError for a load that has not been reported for ASYNC_LOAD_TIMEOUT_S, and so may still write:
        what comes next may not.
        """
        while self._in_flight:
            self._settled += self._collect()
        self._transfer_without_a_step()  # what comes next may take the blocks, or the memory behind them
        while self.scheduler.is_loading:
            self._wait_for_loads()
            if overdue := self._overdue():
                raise ConnectorError(self._unreported(overdue[0]))
            self._transfer_without_a_step()  # what was loaded may have to be saved elsewhere

    def idle(self) -> bool:
        """For a caller that has nothing to step: does a piece of work that was put off, and says whether it did."""
        if self._missing or self.has_unfinished or not self.runner.num_pending:
            return False
        return self._record_next()

    def replace_runner(self, runner: Runner) -> None:
        """Goes on with another one, over a state that knows no request (`Scheduler.resize_rows`). Settle first."""
        assert not self._in_flight, "steps are in flight on the runner that is to be replaced"
        self.runner = runner

    # -- what is there -----------------------------------------------------------------------------------------------

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of what is not there; nothing runs until all is."""
        return tuple(self._missing)

    def set_missing(self, name: str, why: str) -> None:
        """No step may run without it. `why`, in an error, says what to do. Settle first."""
        self._missing[name] = why

    def set_there(self, name: str) -> None:
        self._missing.pop(name, None)

    def require_alive(self) -> None:
        """Raises EngineDeadError after a failure: what the device holds is not known any more."""
        if self.failure is not None:
            raise EngineDeadError(str(self.failure)) from self.failure.__cause__

    def _require_all(self) -> None:
        self.require_alive()
        if self._missing:
            raise UnavailableError("; ".join(f"no {name}: {why}" for name, why in self._missing.items()))

    # -- recording between steps -------------------------------------------------------------------------------------

    def _record_under_load(self) -> None:
        """Where requests run, only if none waits, and for a small share of the time."""
        now = time.perf_counter()
        if (
            self.scheduler.num_waiting == 0
            and not self.scheduler.is_loading
            and now >= self._record_again_at
            and self.runner.has_due
        ):
            self.settle()
            self._record_next()
            done = time.perf_counter()
            self._record_again_at = done + (done - now) * (1 / RECORDING_SHARE - 1)

    def _record_next(self) -> bool:
        done = self.runner.record_next()
        if done is None:
            return False
        if done.error is None:
            left, milliseconds = self.runner.num_pending, done.seconds * 1e3
            logger.info("recorded %s %s in %.0f ms, %d to come", done.mode, done.key, milliseconds, left)
        else:
            logger.warning("%s %s cannot be recorded and will run without a graph: %s", done.mode, done.key, done.error)
        return True

    # -- inside ------------------------------------------------------------------------------------------------------

    def poll_connector(self) -> None:
        """Tells the connector's scheduler side what its worker side has done, and the scheduler what it has loaded.
        Steps do so too."""
        if self._connector is not None:
            self._connector.scheduler.update_connector_output(self._connector.worker.get_finished())
            self.scheduler.take_loaded()

    def _wait_for_loads(self) -> None:
        """For a moment: new requests and whoever wants to stop must not wait for a load's end."""
        time.sleep(LOAD_POLL_S)
        self.poll_connector()

    def _overdue(self) -> list[Request]:
        return self.scheduler.loading_since(time.monotonic() - ASYNC_LOAD_TIMEOUT_S)

    def _unreported(self, request: Request) -> str:
        name = "the KV connector" if self._connector is None else self._connector.name
        return (
            f"{name} has not reported the end of its load for request {request.request_id!r} within "
            f"{ASYNC_LOAD_TIMEOUT_S:g} s; the blocks that it may still write into stay taken"
        )

    def _fail_overdue(self) -> None:
        """Ends requests whose loads the connector does not report. Their blocks are nobody else's until it does."""
        for request in self._overdue():
            if not request.finished:
                self._fail_alone(request, self._unreported(request))

    def _fail_if_stuck(self) -> None:
        """Ends what waits for blocks that only such loads have, since nothing else will ever free any."""
        overdue, scheduler = self._overdue(), self.scheduler
        if overdue and not (scheduler.num_running or scheduler.num_loading or scheduler.num_deferred):
            for request in scheduler.unfinished():
                self._fail_alone(request, f"there are not enough KV blocks: {self._unreported(overdue[0])}")

    def _fail_alone(self, request: Request, message: str) -> None:
        logger.error("request %r: %s", request.request_id, message)
        self.scheduler.fail(request.request_id, message)
        output = self._outputs.pop(request.request_id, None)
        if output is not None:
            delta = Delta(request.request_id, (), output.finish(), True, FinishReason.ERROR.value, message, ())
            self._settled.append(delta)
            if output.pending is not None:
                output.pending.append(delta)

    def _transfer_without_a_step(self) -> None:
        """What the connector wants to save or to load asynchronously goes with the next step; where none may come, at
        once."""
        if self._connector is None or (meta := self._connector.scheduler.build_connector_meta()) is None:
            return
        try:
            self._connector.worker.start_load_kv(meta)
        except BaseException:
            self._connector.scheduler.step_dropped(meta)
            raise

    def _take_settled(self) -> list[Delta]:
        deltas, self._settled = self._settled, []
        return deltas

    def _collect(self) -> list[Delta]:
        oldest = self._in_flight[0]  # until it is collected: after Ctrl-C it can be, again
        try:
            result = self.runner.collect(oldest)
        except Exception as error:
            self._fail(error)
            raise
        self._in_flight.popleft()
        try:
            self.poll_connector()
            events = self.scheduler.update(oldest.plan, result)
        except Exception as error:
            self._fail(error, oldest.plan)
            raise
        for request_id, rows in (result.prompt_logprobs or {}).items():
            if (output := self._outputs.get(request_id)) is not None:
                output.add_prompt_logprobs(rows)
        deltas = [delta for event in events if (delta := self._delta(event))]
        if not self.scheduler.has_unfinished and not self._in_flight:
            self._transfer_without_a_step()
        return deltas

    def _fail(self, error: BaseException, *plans: StepPlan) -> None:
        """Ends every request. `plans` are of steps that are not among those in flight here."""
        message = f"the engine has failed: {type(error).__name__}: {error}"
        self.failure = EngineDeadError(message)
        self.failure.__cause__ = error
        plans = (*plans, *(step.plan for step in self._in_flight))
        self._in_flight.clear()
        self._settled.clear()
        self._outputs.clear()
        self.scheduler.fail_all(plans, message)

    def _launch(self, plan: StepPlan) -> InFlight:
        """A step that cannot be launched fails its requests; the others go on once the caller has heard of it."""
        try:
            return self.runner.launch(plan)
        except BaseException as error:
            if not self._end_loads(plan):
                raise
            for request in self.scheduler.discard(plan, f"{type(error).__name__}: {error}"):
                self._outputs.pop(request.request_id, None)
            self.runner.recover()
            raise

    def _end_loads(self, plan: StepPlan) -> bool:
        """What a step that was not launched began to load may still be written into its blocks, which others are about
        to get. False, and the engine has failed, if it does not end."""
        if self._connector is None or plan.connector_meta is None:
            return True
        try:
            if self._connector.worker.wait_for_loads(DROPPED_LOAD_TIMEOUT_S):
                return True
            error: BaseException = ConnectorError(
                f"{self._connector.name} still writes into KV blocks, {DROPPED_LOAD_TIMEOUT_S:g} s after the step that "
                f"loads them could not be launched (requests {', '.join(row.request_id for row in plan.rows)})"
            )
        except BaseException as raised:  # of a second Ctrl-C too
            error = raised
        self._fail(error, plan)
        return False

    def _delta(self, event: TokenEvent) -> Delta | None:
        request = event.request
        output = self._outputs.get(request.request_id)
        if output is None:
            return None
        finished = event.finished
        # An output whose structure is complete ends with a token that belongs to it.
        is_stop = finished and event.token_id in request.stop_token_ids and request.finish_reason is FinishReason.STOP
        text, matched = output.token(event.token_id, event.logprobs, is_stop=is_stop)
        if matched is not None:
            if not finished:
                self.scheduler.finish(request.request_id, FinishReason.STOP, matched)
                finished = True
            else:
                request.finish_reason, request.stop_reason = FinishReason.STOP, matched
        elif finished:
            text += output.finish()
        if finished:
            del self._outputs[request.request_id]
        tables = () if event.logprobs is None else (output.logprobs[-1],)
        reason = request.finish_reason.value if request.finish_reason else None
        fields = (request.request_id, (event.token_id,), text, finished, reason, request.stop_reason, tables)
        delta: Delta = _new_tuple(Delta, fields)
        if output.pending is not None:
            output.pending.append(delta)
        return delta

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise ConfigError("the prompt is empty: it must have at least one token", field="prompt")
        wrong = next((t for t in token_ids if not isinstance(t, int) or not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise ConfigError(
                f"prompt token id {wrong!r} is not in the vocabulary (0 to {self.vocab_size - 1})", field="prompt"
            )

    def _check_params(self, params: SamplingParams) -> None:
        num_stops = len(self.eos_token_ids | set(params.stop_token_ids or ()))
        if num_stops > MAX_STOP_IDS:
            raise ConfigError(
                f"{num_stops} token ids would end the request: at most {MAX_STOP_IDS}, eos ids included",
                field="stop_token_ids",
            )
        for name, ids in (("logit_bias", params.logit_bias or {}), ("stop_token_ids", params.stop_token_ids or ())):
            wrong = next((token for token in ids if not 0 <= token < self.vocab_size), None)
            if wrong is not None:
                raise ConfigError(
                    f"token id {wrong} in {name} is not in the vocabulary (0 to {self.vocab_size - 1})", field=name
                )
        if params.stop_strings and (self.tokenizer is None or not params.detokenize):
            raise ConfigError("stop strings need text: this model has no tokenizer, or detokenize is off", field="stop")


def _mix(seed: int, number: int) -> int:
    """A 64-bit seed for request `number` (the finaliser of splitmix64: Steele, Lea, Flood, OOPSLA 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)
