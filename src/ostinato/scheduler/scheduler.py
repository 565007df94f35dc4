"""Continuous batching: which requests run how many tokens in the next step. Ids and counts only.

A step is planned from counts alone, so it can be planned while earlier steps still run: a row's next token need not be
known to be scheduled. What is learned late (an eos, a stop string, an abort) costs the discarded tokens of steps that
were already launched, and never a wait.

The rules, in order:
1. Running requests go first, best first: smaller priority value, then earlier arrival. Every decoding row keeps one
   token of the budget, a prompt that is being prefilled takes a chunk of what is left.
2. When KV blocks are short, the worst running request is preempted: it loses its row and its blocks and waits again, to
   be recomputed from its tokens (through the prefix cache, if that still has them). Priority alone never preempts.
3. Waiting requests are admitted in the same order, without overtaking, as long as a row is free and the blocks for all
   their known tokens are, beside one block that each running row may grow into.
4. Rows and blocks let go of are reused only after every step launched before has been collected (see `in_flight`).
5. A request whose KV a connector loads without a step has its blocks and counts as a row from the load's begin. Once it
   is there, it goes before all that wait (see `loads`).

With no step and no load in flight and a request unfinished, `plan` always makes progress: the best request fits alone
(`add` refuses those that do not).
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

from ostinato.connectors.protocol import AsyncKVConnectorScheduler, KVConnectorScheduler
from ostinato.errors import ConfigError, OstinatoError
from ostinato.kv.manager import KVManager, PrefixHit
from ostinato.request import FinishReason, Request, RequestStatus, TokenGrammar
from ostinato.scheduler.draft import Draft, num_planned
from ostinato.scheduler.in_flight import InFlight
from ostinato.scheduler.limits import Limits
from ostinato.scheduler.loads import Loads
from ostinato.scheduler.queue import WaitingQueue, order
from ostinato.scheduler.stop import check_stop, max_length
from ostinato.step import StepPlan, StepResult, TokenLogprobs

__all__ = ["MIN_ASYNC_TOKENS", "Scheduler", "TokenEvent"]

MIN_ASYNC_TOKENS = 256
"""Loads of fewer are left to a step beside others too: 256 are 32 MiB of an 8B model's, a small part of its step."""


class TokenEvent(NamedTuple):
    """One new token of a request; the last one when `finished`."""

    request: Request
    token_id: int
    logprobs: TokenLogprobs | None
    finished: bool


class Scheduler:
    """Owns every request from `add` to its end. `plan` and `update` alternate freely, updates in the order of plans.

    `num_blocks` counts the scratch block. `max_num_seqs` is the number of rows, `max_num_batched_tokens` the most
    tokens of a step, `max_model_len` the most tokens of a sequence. Raises ConfigError for values that cannot work.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        connector: KVConnectorScheduler | None = None,
    ) -> None:
        self._connector = connector
        self._async_connector = connector if isinstance(connector, AsyncKVConnectorScheduler) else None
        self._limits = Limits(max_num_seqs, max_num_batched_tokens, max_model_len)
        on_evict = None if connector is None else connector.block_evicted
        self._kv = KVManager(num_blocks, block_size, enable_prefix_caching, on_evict)
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # best first
        self._requests: dict[str, Request] = {}
        self._free_slots = list(range(max_num_seqs))  # a heap: the lowest goes first, which keeps batches dense
        self._in_flight = InFlight()
        self._loads = Loads()
        self._unadmitted: set[str] = set()  # running, but the device's row knows nothing of them yet
        self._num_deferred = 0
        self._num_added = 0
        self._num_steps = 0
        self._num_preemptions = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running. Steps may still be in flight when none is."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Those without a row."""
        return len(self._waiting) + len(self._loads)

    @property
    def num_deferred(self) -> int:
        """Of those that wait, the ones that the last plan left for later because KV is on its way to them."""
        return self._num_deferred

    @property
    def num_loading(self) -> int:
        """Of those that wait, the ones whose blocks are being loaded."""
        return self._loads.num_under_way

    @property
    def is_loading(self) -> bool:
        """Whether an asynchronous load may still write into blocks, its request's or nobody's any more."""
        return self._loads.any_under_way

    def loading_since(self, begun_s: float) -> list[Request]:
        """Requests, ended ones too, whose asynchronous loads began at this time of `time.monotonic` or before, and may
        still write into blocks."""
        return self._loads.under_way_since(begun_s)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_steps_in_flight(self) -> int:
        """Plans that were neither passed to `update` nor to `discard`."""
        return len(self._in_flight)

    @property
    def preemptions(self) -> int:
        """Preemptions so far, of all requests."""
        return self._num_preemptions

    @property
    def kv(self) -> KVManager:
        """For statistics: free and cached blocks, prefix hits. Only the scheduler changes it."""
        return self._kv

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of that id."""
        return self._requests.get(request_id)

    def unfinished(self) -> tuple[Request, ...]:
        """All that wait or run, in the order of arrival."""
        return tuple(self._requests.values())

    def add(self, request: Request) -> None:
        """Let a fresh request wait for its turn; its `arrival` is set here.

        Raises ConfigError for an id in use, an empty prompt or one that leaves no room for an output token, and
        CapacityError for a request that the whole pool could not hold. A refused request is left as it was.
        """
        if request.request_id in self._requests:
            raise ConfigError(f"request id {request.request_id!r} is in use by an unfinished request")
        self._limits.check(request, self._kv)
        request.arrival = self._num_added
        request.max_length = max_length(request, self._limits.max_model_len)
        self._num_added += 1
        self._requests[request.request_id] = request
        self._waiting.push(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request at the caller's wish. None, and no effect, when it has already ended."""
        return self.finish(request_id, FinishReason.ABORT)

    def fail(self, request_id: str, message: str | None = None) -> Request | None:
        """End a request alone because serving it failed; the message becomes its `stop_reason`."""
        return self.finish(request_id, FinishReason.ERROR, message)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> Request | None:
        """End a request for a reason found outside. Tokens on their way to it will be discarded.

        Returns the request; None, and no effect, when it has already ended.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, reason, stop_reason)
        return request

    def plan(self) -> StepPlan | None:
        """Plan the next step, and count it as in flight. None when nothing can run before a step is collected."""
        draft = Draft(self._limits.max_num_batched_tokens)
        num_preempted = self._num_preemptions
        self._plan_running(draft)
        if not draft.short:
            if self._num_preemptions == num_preempted:
                self._plan_waiting(draft)
            elif not draft:  # all rows gave way to requests that have blocks and no row
                self._admit_loaded(draft)
        if not draft:
            return None
        meta = None if self._connector is None else self._connector.build_connector_meta()
        plan, requests = draft.build(self._num_steps, meta)
        self._num_steps += 1
        self._in_flight.add(plan, requests)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in what the oldest step in flight produced. Rows of requests that have ended since are discarded.

        Raises OstinatoError for a step out of order or a result that does not have the plan's rows.
        """
        if len(result.token_ids) != plan.num_rows or len(result.logprobs) not in (0, plan.num_rows):
            raise OstinatoError(
                f"step {plan.step_id} has {plan.num_rows} rows, its result {len(result.token_ids)} tokens and "
                f"{len(result.logprobs)} log-probabilities"
            )
        requests = self._in_flight.collect(plan.step_id)
        self._release_due()
        events = []
        block_size, logprobs = self._kv.block_size, result.logprobs or (None,) * plan.num_rows
        rows = zip(plan.rows, requests, result.token_ids, logprobs, strict=True)
        for (_, _, start, num_tokens, samples), request, token_id, row_logprobs in rows:
            if request.status is RequestStatus.FINISHED:
                continue
            if samples:
                request.num_in_flight -= 1
                request.tokens.append(token_id)
            end = start + num_tokens
            # one token fills a block only at the block's end, and what was loaded ends where the row began; a preempted
            # request's table is gone
            register = num_tokens > 1 or end % block_size == 0 or start % block_size == 0
            if register and request.status is RequestStatus.RUNNING:
                blocks = self._kv.register_full_blocks(request, end)
                if blocks and self._connector is not None:
                    self._connector.blocks_computed(blocks)
            if samples:
                finished = False
                if token_id in request.stop_token_ids or len(request.tokens) >= request.max_length:
                    finished = self._end_if_done(request)
                if request.grammar is not None and not finished:
                    finished = self._follow(request, request.grammar, token_id)
                events.append(TokenEvent(request, token_id, row_logprobs, finished))
        return events

    def take_loaded(self) -> None:
        """Take in what the connector says of asynchronous loads: their requests go on with the next plan."""
        if self._async_connector is None or not self._loads.any_under_way:
            return
        for request, num_tokens in self._async_connector.get_finished_recving():
            abandoned = self._loads.end(request)
            if abandoned is not None:
                self._kv.release(abandoned)
                continue
            request.num_computed += num_tokens
            blocks = self._kv.register_full_blocks(request, request.num_computed)
            if blocks:
                self._async_connector.blocks_computed(blocks)

    def discard(self, plan: StepPlan, message: str) -> list[Request]:
        """A planned step was not launched, or cannot be collected: fail its requests and forget it. Returns them."""
        failed = [request for request in self._in_flight.drop(plan.step_id) if not request.finished]
        if self._connector is not None and plan.connector_meta is not None:
            self._connector.step_dropped(plan.connector_meta)
        for request in failed:
            self._end(request, FinishReason.ERROR, message)
        self._release_due()
        return failed

    def fail_all(self, plans: Sequence[StepPlan], message: str) -> None:
        """No step will be collected any more: forget all that are in flight, which `plans` are, and fail every request.
        Their blocks are free, but for those that a load under way may still write into."""
        self._in_flight.clear()
        for request in self.unfinished():
            self._end(request, FinishReason.ERROR, message)
        self._release_due()
        if self._connector is not None:
            for plan in plans:
                if plan.connector_meta is not None:
                    self._connector.step_dropped(plan.connector_meta)

    def preempt_all(self, *, weights_changed: bool = False) -> None:
        """The KV cache loses its content: every running request will be recomputed, and no prefix is found any more;
        nor in a connector, if the content itself does not hold. Loads under way still write into their blocks."""
        if weights_changed:
            self.forget_prefixes()
        self._kv.forget_contents()
        self._preempt_loads()
        while self._running:
            self._preempt(self._running[-1])

    def forget_prefixes(self) -> None:
        """Cached prefixes no longer hold (the weights changed): new requests compute all of theirs."""
        self._kv.forget_contents()
        if self._connector is not None:
            self._connector.forget_contents()
        self._preempt_loads()

    def resize_rows(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Other limits from the next step on, over a request state that is new too. Running requests keep their blocks
        and are admitted to new rows, with all their tokens, by the first step that runs them; the worst of them wait
        again where there are fewer rows or tokens than they are. Raises OstinatoError with a step in flight."""
        self._require_settled()
        limits = Limits(max_num_seqs, max_num_batched_tokens, self._limits.max_model_len)
        # never more rows than tokens of a step: `_plan_running` relies on it
        while len(self._running) > min(max_num_seqs, max_num_batched_tokens):
            self._preempt(self._running[-1])
        self._limits, self._free_slots = limits, list(range(max_num_seqs))
        for request in self._running:
            request.slot = heapq.heappop(self._free_slots)
            self._unadmitted.add(request.request_id)

    def resize_pool(self, num_blocks: int) -> None:
        """Another number of KV blocks; requests that hold one that goes are computed again. Raises OstinatoError with a
        step in flight, or while something is loaded into a block that goes."""
        self._require_settled()
        for request in (*self._loads.requests(), *reversed(tuple(self._running))):
            if self._kv.reaches(request, num_blocks):
                self._preempt(request)
        self._kv.resize(num_blocks)

    def check_integrity(self) -> None:
        """Raise OstinatoError unless every block and row is free, held behind a fence or for a load, or one request's
        that runs or loads."""
        self._kv.check_integrity([*self._in_flight.held_tables, *self._loads.dropped_tables])

    def _require_settled(self) -> None:
        if self._in_flight:
            raise OstinatoError(f"{len(self._in_flight)} steps are in flight: collect them first")

    def _follow(self, request: Request, grammar: TokenGrammar, token_id: int) -> bool:
        """Whether the structure of the output ends the request. One that cannot be followed fails it alone."""
        try:
            if grammar.accept(token_id):
                return False
        except OstinatoError as error:
            self._end(request, FinishReason.ERROR, str(error))
            return True
        self._end(request, FinishReason.STOP, None)
        return True

    def _num_left(self, request: Request) -> int:
        """Tokens without a planned step: none once the last token the request may have is on its way."""
        planned = len(request.tokens) + request.num_in_flight
        return 0 if planned >= request.max_length else planned - request.num_computed

    def _plan_running(self, draft: Draft) -> None:
        # What each could run now: `_num_left`, but nothing while the token is in flight that says which may follow in a
        # structure. Written out, because at 256 rows the calls took a tenth of the host's time for a step.
        wanted = [
            0
            if (planned := len(request.tokens) + request.num_in_flight) >= request.max_length
            or (request.grammar is not None and request.num_in_flight)
            else planned - request.num_computed
            for request in self._running
        ]
        num_decoding = wanted.count(1)
        for request, num_wanted in zip(tuple(self._running), wanted, strict=True):
            if draft.budget == 0:
                break
            if num_wanted == 0 or request.status is not RequestStatus.RUNNING:  # a better row may have preempted it
                continue
            num_decoding -= num_wanted == 1
            # There are never more rows than tokens in the budget, because a row is admitted only with a token that no
            # other row wants. So decoding rows always get theirs, and of several prompts the best gets on.
            num_tokens = min(num_wanted, draft.budget - num_decoding)
            end = request.num_computed + num_tokens
            if num_tokens > 0 and (end <= request.kv_capacity or self._grow(request, end, draft)):
                if self._unadmitted and request.request_id in self._unadmitted:
                    self._unadmitted.remove(request.request_id)
                    draft.admit(request, self._kv.table(request.request_id))
                draft.run(request, num_tokens)

    def _grow(self, request: Request, num_tokens: int, draft: Draft) -> bool:
        """Make the request's table hold `num_tokens` tokens, at the expense of worse requests. False: not this step."""
        missing = self._kv.num_missing(request, num_tokens)
        if missing == 0:
            return True
        if draft.short:
            return False
        column = len(self._kv.table(request.request_id))
        while (block_ids := self._kv.extend(request, num_tokens)) is None:
            if self._kv.num_free + self._num_blocks_to_come() >= missing:
                draft.short = True
                return False
            victim = next(other for other in reversed(self._running) if self._num_left(other) > 0)
            if self._loads and order(worst := self._loads.requests()[-1]) > order(victim):
                victim = worst
            self._preempt(victim)
            if victim is request:
                return False
        request.kv_capacity += len(block_ids) * self._kv.block_size
        if request.request_id not in self._unadmitted:  # else its admission brings the whole table
            draft.append(request, column, block_ids)
        return True

    def _num_blocks_to_come(self) -> int:
        """Blocks that the steps and loads in flight will free for sure: those held for them, and of ending requests."""
        ending = [self._kv.table(r.request_id) for r in self._running if self._num_left(r) == 0]
        return self._kv.num_freed_by([*self._in_flight.held_tables, *self._loads.dropped_tables, *ending])

    def _plan_waiting(self, draft: Draft) -> None:
        """Requests whose KV is on its way from elsewhere let others go first."""
        self._admit_loaded(draft)
        deferred: list[Request] = []
        self._admit_waiting(draft, deferred)
        self._num_deferred = len(deferred)
        for request in deferred:
            self._waiting.push(request)

    def _admit_loaded(self, draft: Draft) -> None:
        """Rows for those whose KV has come: all their known tokens where there are blocks, or those that fit theirs."""
        for request in self._loads.ended() if self._loads else ():
            if not self._free_slots or draft.budget == 0:
                return
            start, name = request.num_computed, request.request_id
            num_tokens = min(len(request.tokens) - start, draft.budget)
            if self._num_blocks_reserved() > self._kv.num_free:
                num_tokens = min(num_tokens, request.kv_capacity - start)
            more = self._kv.extend(request, start + num_tokens)
            assert more is not None, "the blocks were reserved"
            self._loads.admit(request)
            self._admit(request, start, list(self._kv.table(name)), draft)
            draft.run(request, num_tokens)

    def _admit_waiting(self, draft: Draft, deferred: list[Request]) -> None:
        while self._waiting and len(self._free_slots) > len(self._loads) and draft.budget > 0:
            request = self._waiting.peek()
            if request.status is RequestStatus.PREEMPTED and self._in_flight.involves(request):
                return  # not all of its tokens are known yet
            if self._loads.is_dropped(request):
                deferred.append(self._waiting.pop())
                continue
            num_known = len(request.tokens)
            hit = self._kv.match(request)
            num_taken = self._kv.num_taken(hit, self._num_with_room(request, 1))
            if num_taken + self._num_blocks_reserved() > self._kv.num_free:
                return
            num_external, load_kv_async = self._external(request, hit)
            if num_external is None:
                deferred.append(self._waiting.pop())
                continue
            num_cached = hit.num_tokens + num_external
            if self._async_connector is not None and load_kv_async:
                self._waiting.pop()
                self._load(request, hit, num_external, self._async_connector)
                continue
            num_tokens = min(num_known - num_cached, draft.budget)
            block_ids = self._kv.allocate(request, hit, num_cached + num_tokens)
            assert block_ids is not None, "the blocks were there a moment ago"
            if self._connector is not None:
                self._connector.update_state_after_alloc(request, block_ids, hit.num_tokens, num_external)
            self._waiting.pop()
            self._admit(request, num_cached, block_ids, draft)
            draft.run(request, num_tokens)

    def _external(self, request: Request, hit: PrefixHit) -> tuple[int | None, bool]:
        """Tokens after the hit whose KV the connector can load, None when it does not know yet; and whether to load
        them without a step."""
        if self._connector is None or not self._kv.enable_prefix_caching:
            return 0, False
        if request.params.prompt_logprobs is not None:  # they come from running the prompt
            return 0, False
        hashes = self._kv.hashes_to_match(request)
        matched = self._connector.get_num_new_matched_tokens(request, hashes, hit.num_tokens)
        num_external, load_kv_async = matched if isinstance(matched, tuple) else (matched, False)
        if not num_external:
            return num_external, False
        if load_kv_async is None:  # alone, a request has its first token earlier when its layers load as they run
            load_kv_async = num_external >= MIN_ASYNC_TOKENS and bool(self._running or self._loads)
        return num_external, load_kv_async

    def _load(self, request: Request, hit: PrefixHit, num_external: int, connector: AsyncKVConnectorScheduler) -> None:
        """Give the request blocks for its cached tokens and one more, and let the connector load into them."""
        block_ids = self._kv.allocate(request, hit, hit.num_tokens + num_external + 1)
        assert block_ids is not None, "the blocks were there a moment ago"
        connector.update_state_after_alloc(request, block_ids, hit.num_tokens, num_external, load_kv_async=True)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed = hit.num_tokens
        request.kv_capacity = len(block_ids) * self._kv.block_size
        self._loads.begin(request)

    def _num_with_room(self, request: Request, num_more: int) -> int:
        """KV of the planned tokens and of `num_more` after them, as far as the request may get."""
        return min(num_planned(request) + num_more, request.max_length - 1)

    def _num_blocks_reserved(self) -> int:
        """Blocks that running rows, and those to come, lack for their tokens and a block more: without, newcomers are
        soon preempted."""
        rows, block_size = (*self._running, *self._loads.requests()), self._kv.block_size
        return sum(self._kv.num_missing(r, self._num_with_room(r, block_size)) for r in rows)

    def _admit(self, request: Request, num_hit_tokens: int, block_ids: list[int], draft: Draft) -> None:
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_hit_tokens
        request.status = RequestStatus.RUNNING
        request.slot = heapq.heappop(self._free_slots)
        request.num_computed = num_hit_tokens
        request.kv_capacity = len(block_ids) * self._kv.block_size
        insort(self._running, request, key=order)
        draft.admit(request, block_ids)

    def _preempt_loads(self) -> None:
        for request in reversed(self._loads.requests()):
            self._preempt(request)

    def _preempt(self, request: Request) -> None:
        """Back to waiting. Samples on their way are kept when they arrive; KV is computed again."""
        self._let_go(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.push(request)  # it arrived before all that wait at its priority, so it is first among them

    def _end_if_done(self, request: Request) -> bool:
        reason = check_stop(request, self._limits.max_model_len)
        if reason is not None:
            token_id = request.tokens[-1]
            asked_for = reason is FinishReason.STOP and token_id in (request.params.stop_token_ids or ())
            self._end(request, reason, token_id if asked_for else None)
        return reason is not None

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        if request.status in (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS):
            self._let_go(request)
        else:
            self._waiting.remove(request.request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.num_in_flight = 0
        self._kv.forget(request.request_id)
        if self._connector is not None:
            self._connector.request_finished(request)
        del self._requests[request.request_id]

    def _let_go(self, request: Request) -> None:
        """Take a request's row and blocks away; they are free once no step or load in flight can touch them."""
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            block_ids = self._kv.detach(request.request_id)
            request.kv_capacity = 0
            if not self._loads.drop(request, block_ids):
                self._kv.release(block_ids)
            return
        assert request.slot is not None
        self._running.remove(request)
        self._unadmitted.discard(request.request_id)
        self._in_flight.hold(request.slot, self._kv.detach(request.request_id))
        request.slot = None
        request.kv_capacity = 0
        self._release_due()

    def _release_due(self) -> None:
        for held in self._in_flight.due():
            self._kv.release(held.block_ids)
            heapq.heappush(self._free_slots, held.slot)
