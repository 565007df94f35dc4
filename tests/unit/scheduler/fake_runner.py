"""A runner without a device, which keeps what a device would keep and checks every plan against it.

Its KV cells do not hold vectors but the prefix whose KV they stand for and the weights that made it, so a read of a
wrong, stale or foreign cell is seen at once. Its "model" is a function of the known tokens alone, so any schedule must
produce the same outputs.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from fake_connector import FakeConnector

from ostinato.kv.block_pool import SCRATCH_BLOCK
from ostinato.request import FinishReason, Request, RequestStatus, SamplingParams
from ostinato.scheduler import Scheduler, TokenEvent
from ostinato.step import StepPlan, StepResult

EOS = 0


def next_token(tokens: list[int], seed: int, vocab_size: int, banned: frozenset[int] = frozenset()) -> int:
    """The fake model: a token drawn from the known tokens and the seed; never a banned one."""
    draw = random.Random(f"{seed} {tokens}")
    while (token := draw.randrange(vocab_size)) in banned:
        pass
    return token


def length_limit(num_prompt_tokens: int, params: SamplingParams, max_model_len: int) -> int:
    return max_model_len if params.max_tokens is None else min(num_prompt_tokens + params.max_tokens, max_model_len)


def solo_outputs(request: Request, max_model_len: int, vocab_size: int) -> list[int]:
    """What the request must produce, whoever runs beside it."""
    tokens = list(request.prompt_token_ids)
    outputs: list[int] = []
    while len(tokens) < length_limit(len(tokens) - len(outputs), request.params, max_model_len):
        banned = request.stop_token_ids if len(outputs) < request.params.min_tokens else frozenset()
        tokens.append(next_token(tokens, request.seed, vocab_size, banned))
        outputs.append(tokens[-1])
        if tokens[-1] in request.stop_token_ids:
            break
    return outputs


def make_request(request_id: str, prompt: list[int], *, priority: int = 0, seed: int = 0, **params: object) -> Request:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=sampling,
        stop_token_ids=frozenset(sampling.stop_token_ids or ()) | (frozenset() if sampling.ignore_eos else {EOS}),
        seed=seed,
        priority=priority,
    )


@dataclass
class Row:
    """One row of the device's request state."""

    request_id: str
    tokens: list[int]
    num_computed: int
    num_prompt_tokens: int
    table: list[int]
    seed: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    max_length: int
    weights: int


@dataclass
class FakeRunner:
    """Runs plans in the order of their launch, and hands results out in that order, as late as the test likes."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int = 7
    weights: int = 0  # counts their updates
    rows: dict[int, Row] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)  # whose KV stays though its row goes: the weights that made it
    cells: dict[tuple[int, int], tuple[tuple[int, ...], int]] = field(default_factory=dict)
    roomy: set[str] = field(default_factory=set)  # whose tables are longer than their KV: it should have been loaded
    launched: deque[tuple[StepPlan, StepResult]] = field(default_factory=deque)
    max_seen_rows: int = 0

    def launch(self, plan: StepPlan) -> None:
        assert 0 < plan.num_tokens <= self.max_num_batched_tokens
        slots = [row.slot for row in plan.rows]
        assert slots == sorted(set(slots)), "each row takes part once, in the order of slots"
        assert all(0 <= slot < self.max_num_seqs for slot in slots)
        touched = {admission.slot for admission in plan.admissions} | {append.slot for append in plan.appends}
        assert touched <= set(slots), "state changes only for rows that run"
        self.max_seen_rows = max(self.max_seen_rows, len(slots))
        for admission in plan.admissions:
            self.rows[admission.slot] = Row(
                admission.request_id,
                list(admission.token_ids),
                admission.num_computed,
                admission.num_prompt_tokens,
                list(admission.block_ids),
                admission.seed,
                admission.params.min_tokens,
                admission.stop_token_ids,
                length_limit(admission.num_prompt_tokens, admission.params, self.max_model_len),
                self.moved.get(admission.request_id, self.weights),
            )
            row = self.rows[admission.slot]
            for position in range(admission.num_computed):
                assert self._cell(row, position)[1] == row.weights, "a hit on old weights' KV"
        for append in plan.appends:
            assert append.column == len(self.rows[append.slot].table)
            assert append.block_ids
            self.rows[append.slot].table += append.block_ids
        self._write(plan)
        self.launched.append((plan, StepResult(tuple(self._sample(plan)))))

    def collect(self) -> tuple[StepPlan, StepResult]:
        return self.launched.popleft()

    def _write(self, plan: StepPlan) -> None:
        """Every row writes its KV before any row reads, as the layers of a batch do."""
        for part in plan.rows:
            row = self.rows[part.slot]
            assert row.request_id == part.request_id
            assert part.start == row.num_computed, "a row goes on where it stopped"
            end = part.start + part.num_tokens
            assert part.num_tokens >= 1 and end <= len(row.tokens)
            assert part.samples == (end == len(row.tokens))
            covered = -(-end // self.block_size)
            assert len(row.table) == covered or (len(row.table) > covered and row.request_id in self.roomy), (
                "the table covers the step and no more"
            )
            assert all(SCRATCH_BLOCK < block_id < self.num_blocks for block_id in row.table)
            for position in range(part.start, end):
                cell = (row.table[position // self.block_size], position % self.block_size)
                self.cells[cell] = (tuple(row.tokens[: position + 1]), row.weights)
            row.num_computed = end

    def _sample(self, plan: StepPlan) -> list[int]:
        sampled = []
        for part in plan.rows:
            row = self.rows[part.slot]
            for position in range(row.num_computed):
                assert self._cell(row, position)[0] == tuple(row.tokens[: position + 1]), (
                    f"step {plan.step_id}: row {part.slot} of {part.request_id} reads foreign KV at {position}"
                )
            if not part.samples:
                sampled.append(-1)
                continue
            banned = row.stop_token_ids if len(row.tokens) - row.num_prompt_tokens < row.min_tokens else frozenset()
            row.tokens.append(next_token(row.tokens, row.seed, self.vocab_size, banned))
            assert len(row.tokens) <= row.max_length, "a row was planned past its end"
            sampled.append(row.tokens[-1])
        return sampled

    def _cell(self, row: Row, position: int) -> tuple[tuple[int, ...], int]:
        cell = (row.table[position // self.block_size], position % self.block_size)
        return self.cells.get(cell, ((), -1))


class Watch:
    """Looks at block tables after every call, and at every plan, and holds the scheduler to its promises."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.tables: dict[str, tuple[Request, list[int]]] = {}
        self.fences: dict[int, int] = {}  # block -> step that must be collected before it is handed out
        self.slot_fences: dict[int, int] = {}
        self.slots: dict[str, int] = {}
        self.kept: dict[str, list[int]] = {}  # tables of requests that will be admitted with them once more
        self.loading: set[str] = set()  # requests without a row: no step knows their blocks
        self.last_launched = -1
        self.last_collected = -1

    def look(self) -> None:
        """After any call: tables only grow, sharing is of equal prefixes, and what left a table gets its fence."""
        self.scheduler.check_integrity()
        live = {
            request_id: request for request_id in self.tables if (request := self.scheduler.get(request_id)) is not None
        }
        now = {rid: (request, list(self.scheduler.kv.table(rid))) for rid, request in live.items()}
        for rid, (request, before) in self.tables.items():
            same = rid in now and now[rid][0] is request and now[rid][1][: len(before)] == before
            if same and (before or now[rid][1] or request.slot is not None):
                continue
            assert rid not in now or now[rid][0] is not request or not now[rid][1], "a live table changed inside"
            # a block that others share gets a later fence when the last of them goes
            for block_id in before if rid not in self.loading else ():
                self.fences[block_id] = self.last_launched
            self.kept.pop(rid, None)
            if rid in self.slots:
                self.slot_fences[self.slots.pop(rid)] = self.last_launched
        self._check_sharing([(request.tokens, table) for request, table in now.values() if table])
        self.tables = now
        self.loading = {rid for rid, (r, _) in now.items() if r.status is RequestStatus.WAITING_FOR_REMOTE_KVS}
        for rid, (request, table) in now.items():
            if request.slot is not None:
                self.slots[rid] = request.slot
            elif rid in self.loading:
                assert table and request.num_computed < len(request.tokens)
            else:
                assert not table and request.num_computed == 0
        assert len(set(self.slots.values())) == len(self.slots) == self.scheduler.num_running

    def planned(self, plan: StepPlan) -> None:
        """Blocks and rows in a new plan come from behind their fences; cached full blocks may be shared any time."""
        block_size = self.scheduler.kv.block_size
        new_blocks = [block_id for append in plan.appends for block_id in append.block_ids]
        for admission in plan.admissions:
            assert admission.num_computed < len(admission.token_ids)
            kept = self.kept.pop(admission.request_id, None)
            if kept is None:
                assert admission.num_computed % block_size == 0
                kept = list(admission.block_ids[: admission.num_computed // block_size])
            assert list(admission.block_ids[: len(kept)]) == kept
            new_blocks += admission.block_ids[len(kept) :]
            assert self.slot_fences.pop(admission.slot, -1) <= self.last_collected
        assert len(new_blocks) == len(set(new_blocks))
        for block_id in new_blocks:
            assert self.fences.pop(block_id, -1) <= self.last_collected, f"block {block_id} handed out before its fence"
        self.last_launched = plan.step_id

    def loads_into(self, block_ids: list[int]) -> None:
        """A connector begins to write."""
        for block_id in block_ids:
            assert self.fences.pop(block_id, -1) <= self.last_collected, f"block {block_id} loaded before its fence"

    def add(self, request: Request) -> None:
        self.tables[request.request_id] = (request, [])

    def _check_sharing(self, tables: list[tuple[list[int], list[int]]]) -> None:
        owners: dict[int, tuple[int, list[int]]] = {}
        block_size = self.scheduler.kv.block_size
        for tokens, table in tables:
            assert len(table) == len(set(table))
            for column, block_id in enumerate(table):
                prefix = tokens[: (column + 1) * block_size]
                if block_id in owners:
                    assert owners[block_id] == (column, prefix), f"block {block_id} is shared by different prefixes"
                    assert len(prefix) == (column + 1) * block_size, "only full blocks are shared"
                owners[block_id] = (column, prefix)


@dataclass
class Harness:
    """Scheduler, runner and watch in one, driven by the tests."""

    num_blocks: int = 16
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 48
    enable_prefix_caching: bool = True
    max_in_flight: int = 1
    vocab_size: int = 7
    connector: FakeConnector | None = None

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.enable_prefix_caching,
            connector=self.connector,
        )
        self.runner = FakeRunner(
            self.num_blocks,
            self.block_size,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.max_model_len,
            self.vocab_size,
        )
        self.watch = Watch(self.scheduler)
        self.plans: list[StepPlan] = []
        if self.connector is not None:
            self.connector.cells, self.connector.loads_into = self.runner.cells, self.watch.loads_into

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.watch.add(request)
        self.watch.look()
        return request

    def launch(self) -> StepPlan | None:
        """Plan a step and start it, when there is room in flight and something to run."""
        if self.scheduler.num_steps_in_flight >= self.max_in_flight:
            return None
        plan = self.scheduler.plan()
        self.watch.look()  # what planning took from preempted requests is behind the steps launched before
        if plan is None:
            if self.connector is not None:
                self.connector.start(self.connector.build_connector_meta())
            under_way = self.scheduler.num_steps_in_flight or self.scheduler.is_loading
            assert under_way or not self.scheduler.has_unfinished, "stuck"
        else:
            if self.connector is not None:
                self.connector.start(plan.connector_meta)
                self.runner.roomy = self.connector.failed
            self.runner.moved = {rid: self.runner.moved[rid] for rid in self.watch.kept}
            self.watch.planned(plan)
            self.runner.launch(plan)
            if self.connector is not None:
                self.connector.check_apart([self.runner.rows[row.slot].table for row in plan.rows])
            self.plans.append(plan)
        return plan

    def collect(self) -> list[TokenEvent]:
        plan, result = self.runner.collect()
        self.watch.last_collected = plan.step_id
        self.poll()
        events = self.scheduler.update(plan, result)
        self.watch.look()
        return events

    def poll(self) -> None:
        """What an engine asks of a connector after each step, and while there is none."""
        if self.connector is not None:
            self.connector.update_connector_output(self.connector.get_finished())
            self.scheduler.take_loaded()
            self.watch.look()

    def plan_and_discard(self) -> list[Request]:
        """A step is planned, and then its launch fails."""
        plan = self.scheduler.plan()
        self.watch.look()
        if plan is None:
            return []
        self.watch.planned(plan)
        failed = self.scheduler.discard(plan, "launch failed")
        self.watch.last_launched = self.runner.launched[-1][0].step_id if self.runner.launched else -1
        self.watch.look()
        return failed

    def finish(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> Request | None:
        request = self.scheduler.finish(request_id, reason, stop_reason)
        self.watch.look()
        return request

    def resize_rows(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Between two steps: another request state, of other sizes."""
        self.scheduler.resize_rows(max_num_seqs, max_num_batched_tokens)
        self.runner.moved |= {row.request_id: row.weights for row in self.runner.rows.values()}
        self.runner.rows.clear()
        self.runner.max_num_seqs, self.runner.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.watch.slot_fences.clear()
        self.watch.look()
        self.watch.kept = {rid: list(table) for rid, (_, table) in self.watch.tables.items() if table}

    def resize_pool(self, num_blocks: int) -> None:
        self.scheduler.resize_pool(num_blocks)
        self.num_blocks = self.runner.num_blocks = num_blocks
        for cell in [cell for cell in self.runner.cells if cell[0] >= num_blocks]:
            del self.runner.cells[cell]
        self.watch.look()

    def step(self) -> list[TokenEvent]:
        """What an engine does in one turn: fill the flight, then collect the oldest step."""
        while self.launch():
            pass
        if self.runner.launched:
            return self.collect()
        self.poll()
        return []

    def run(self, max_steps: int = 5000) -> None:
        """To the end of every request and step."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and not self.runner.launched:
                break
            self.step()
        assert not self.scheduler.has_unfinished, "requests do not end"
        while self.scheduler.is_loading:  # for requests that are over
            self.poll()
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing is left behind."""
        assert self.scheduler.num_running == self.scheduler.num_waiting == self.scheduler.num_steps_in_flight == 0
        assert self.scheduler.kv.num_free == self.num_blocks - 1
        assert not any(self.scheduler.kv.table(request_id) for request_id in self.watch.tables)
        self.scheduler.check_integrity()
