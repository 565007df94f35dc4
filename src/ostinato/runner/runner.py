"""Carries out one plan at a time: stage the differences, replay (or call) the step, hand the tokens back later.

`launch` never waits for the GPU. `collect` waits for one step's event and reads its tokens from host memory that the
step itself wrote. The step is one function, `_step`: what is recorded, what runs eagerly and what checks a replay are
all calls of it, and differ only in the `cut` they pass.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import torch

from ostinato.connectors.protocol import KVConnectorWorker
from ostinato.errors import OstinatoError, StaleGraphError
from ostinato.graphs.backends import GraphBackend
from ostinato.graphs.capture import record_all
from ostinato.graphs.dispatch import BatchKey, BatchShape, Decision, Dispatcher, Reason, StepCounters
from ostinato.graphs.mode import LAYER_CUTS, RuntimeMode
from ostinato.graphs.pending import Capture, PendingKeys, first_keys
from ostinato.graphs.recorder import Cut, Recorder, no_cut, prepared
from ostinato.graphs.statics import Statics
from ostinato.graphs.store import GraphStore
from ostinato.kernels import ops
from ostinato.kernels.decode_tiles import DecodeTiles, block_cells, tile_config
from ostinato.kernels.flash_attention import MIN_TOKENS
from ostinato.kernels.splits import choose_num_splits
from ostinato.kv.storage import KVScales, KVStorage
from ostinato.models.decoder import AttentionArgs, Decoder
from ostinato.models.weights import DecoderWeights
from ostinato.runner import logprobs
from ostinato.runner.checker import StepChecker
from ostinato.runner.history import LaunchHistory
from ostinato.runner.inputs import StepBuffers
from ostinato.runner.observer import StepObserver
from ostinato.runner.state import Patches, RequestState
from ostinato.step import Admission, StepPlan, StepResult

CUTS: dict[RuntimeMode, frozenset[str]] = {
    RuntimeMode.FULL: frozenset(),
    RuntimeMode.PIECEWISE: frozenset({*LAYER_CUTS, "head"}),
}

_UNWRITTEN = -2
"""What the host leaves in a row of the output ring that it has read: a step that then fails to write it is noticed."""


class RecordedLater(NamedTuple):
    """A key that was recorded between steps, in how many seconds; `error` says why it could not be."""

    mode: RuntimeMode
    key: BatchKey
    seconds: float
    error: Exception | None


@dataclass(slots=True)
class InFlight:
    """A launched step whose tokens have not been read."""

    plan: StepPlan
    decision: Decision
    ring_row: int
    event: torch.cuda.Event | None
    wanted: tuple[int, ...]  # alternatives asked for, by row; -1 for none; empty when no row asks
    fetched: logprobs.StepLogprobs | None
    prompt_logprobs: dict[str, logprobs.PromptLogprobs]


class Runner:
    """Owns the recordings and the order of launches. One thread."""

    def __init__(
        self,
        *,
        model: Decoder,
        storage: KVStorage,
        state: RequestState,
        buffers: StepBuffers,
        backend: GraphBackend,
        dispatcher: Dispatcher,
        block_size: int,
        max_in_flight: int,
        capture: Capture = Capture.EAGER,
        connector: KVConnectorWorker | None = None,
    ) -> None:
        self.model, self.storage, self.state, self.buffers = model, storage, state, buffers
        self.backend, self.dispatcher = backend, dispatcher
        self.counters = StepCounters()
        self.history = LaunchHistory()
        self.statics = Statics()
        self.store = GraphStore(self.statics)
        self._block_size, self._capture = block_size, capture
        self._connector = connector
        self._pending = PendingKeys((), on_demand=False)
        self._available: Collection[tuple[RuntimeMode, BatchKey]] | None = None  # None: all that can be picked
        self._cuda = state.arena.device.type == "cuda"
        device = state.arena.device
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count if self._cuda else 1
        self._patches = Patches(state, capacity=1 << 15, depth=max_in_flight + 1)
        # what the device holds now, to send only differences
        self._row_slot = np.full(buffers.max_rows, state.layout.scratch, dtype=np.int32)
        self._query_start = np.zeros(buffers.max_rows + 1, dtype=np.int32)
        self._staged_rows: tuple[tuple[int, int], ...] = ()
        self._wanted_logprobs = [-1] * state.layout.num_slots
        self._any_logprobs = False
        self._prompts: dict[int, Admission] = {}  # by state row: requests that want their prompt's log-probabilities
        self._sampling = ops.SamplingState(*(state.named_view(name) for name in ops.SamplingState._fields))
        self._num_launched = 0
        self._live_rows = 0
        self._checker: StepChecker | None = None
        self._observer: StepObserver | None = None
        for name, tensor in (*state.named(), *buffers.named()):
            self.statics.add(name, partial(_same, tensor))
        for name, _ in model.weights.named():
            self.statics.add(f"weights.{name}", _weight_getter(model.weights, name))
        self.statics.add("rope.cos_sin", lambda: model.cos_sin)
        self.statics.add("kv.pool", lambda: storage.pool)
        if (scales := storage.scales) is not None:
            self.statics.add("kv.scales", lambda: scales.values)
        for name, tensor in () if connector is None else connector.named():
            self.statics.add(name, partial(_same, tensor))

    # -- recording ---------------------------------------------------------------------------------------------------

    def record(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Records what has to be there before the first step, then seals the store: every key that the dispatcher can
        pick, or a few of them where the others are recorded later (`record_next`). Nothing may be in flight."""
        self._record_for(self.dispatcher, progress)

    def change_dispatcher(
        self,
        dispatcher: Dispatcher,
        progress: Callable[[int, int], None] | None = None,
        approve: Callable[[], object] | None = None,
    ) -> int:
        """Other modes or sizes over the same state and buffers: records what is missing, then drops what is not picked
        any more, and returns how many that were. `approve` is called in between. Nothing may be in flight. Whatever
        raises, all is then as it was before."""
        before = tuple(self.store.available())
        pending, available = self._pending, self._available
        try:
            self._record_for(dispatcher, progress)
            if approve is not None:
                approve()
        except BaseException:
            self.store.drop(set(self.store.available()).difference(before))
            self._pending, self._available = pending, available
            raise
        self.dispatcher = dispatcher
        if self._checker is not None:
            self._checker.check_all_again()
        return self.store.drop(set(before).difference(dispatcher.keys()))

    def record_next(self) -> RecordedLater | None:
        """Records the key that is most wanted of those that are not recorded yet; None when none is due. Nothing may be
        in flight. A key that cannot be recorded is left to run without, with a warning."""
        index = self._pending.due()
        if index is None:
            return None
        began, error = time.perf_counter(), None
        try:
            self._record_keys([index], collect_garbage=False)
        except (OstinatoError, torch.OutOfMemoryError) as raised:
            error = raised
        self._pending.done(index)
        keys = self.dispatcher.keys()
        if all(key in self.store for key in keys):
            self._available = None
        return RecordedLater(*index, time.perf_counter() - began, error)

    @property
    def num_pending(self) -> int:
        """Keys that may yet be recorded between steps."""
        return len(self._pending)

    @property
    def has_due(self) -> bool:
        """Whether `record_next` would record one."""
        return self._pending.due() is not None

    def pending_bytes(self) -> int:
        """What recording all of them may take, by what the smallest recording of each mode took: the temporary memory
        of a step lies in the pool since the largest was made, and a graph's own size hardly depends on its key."""
        largest_first = sorted(self.store.table(), key=lambda line: line.key, reverse=True)
        smallest = {line.mode: line.bytes for line in largest_first}  # the last one of a mode stays
        return sum(smallest.get(mode, 0) for mode, _ in self._pending)

    def _record_for(self, dispatcher: Dispatcher, progress: Callable[[int, int], None] | None) -> None:
        keys = dispatcher.keys()
        now = missing = [index for index in keys if index not in self.store]
        if self._capture is not Capture.EAGER:
            num_smallest = 1 if self._capture is Capture.LAZY else 3
            now = [index for index in first_keys(keys, num_smallest) if index not in self.store]
        self._record_keys(now, progress)
        later = [index for index in missing if index not in self.store]
        self._pending = PendingKeys(later, on_demand=self._capture is Capture.LAZY)
        self._available = self.store.available() if later else None

    def _record_keys(
        self,
        keys: Sequence[tuple[RuntimeMode, BatchKey]],
        progress: Callable[[int, int], None] | None = None,
        *,
        collect_garbage: bool = True,
    ) -> None:
        """Over padding alone: the rows of the last step are taken out first, so that no request is touched."""
        self._stage_rows((), 0)
        self._patches.apply()
        self._live_rows = 1
        try:
            with self.store.unsealed():
                record_all(
                    self.store,
                    Recorder(self.backend, self.statics),
                    keys,
                    step=self._step,
                    warm=partial(self._step, num_layers=2),
                    cuts=CUTS,
                    progress=progress,
                    collect_garbage=collect_garbage,
                )
        finally:
            self.reset_step_count()
        self.store.seal()

    def warm_up(self) -> None:
        """Eager calls over padding only, so that no kernel of a product is compiled while requests run: of every size
        for which there are other ones, with two layers, since neither a head between graphs nor an eager step has a key
        that is warmed up before it is recorded. Then the largest ragged step, which shows the peak of activations."""
        most_tokens, most_rows = self.buffers.max_tokens, self.buffers.max_rows
        for num_tokens in sorted({min(size, most_tokens) for size in self.model.kernel_sizes}):
            self._live_rows = min(num_tokens, most_rows)
            self._step(RuntimeMode.NONE, BatchKey(num_tokens, self._live_rows, None), no_cut, num_layers=2)
        self._live_rows = most_rows
        self._step(RuntimeMode.NONE, BatchKey(most_tokens, most_rows, None), no_cut)
        self.reset_step_count()

    def reset_step_count(self) -> None:
        """Steps run outside `launch` advance the device's count too; `launch` needs both counts to agree."""
        if self._cuda:
            torch.cuda.synchronize()
        self.state["step_count"].zero_()
        self.buffers.ring.fill_(_UNWRITTEN)
        self._num_launched = 0

    def recover(self) -> None:
        """After a launch that failed half-way: forgets what it staged, and what the device holds of the batch's rows;
        the device's step count may have run ahead of `launch`'s."""
        self._patches.clear()
        self._staged_rows = ()
        self._row_slot[:] = self._query_start[:] = -1
        self.state["step_count"].fill_(self._num_launched)

    def take_over(self, other: Runner) -> None:
        """Goes on with the counts and the observer of a runner that this one replaces."""
        self.counters, self._observer = other.counters, other._observer

    def verify_statics(self) -> None:
        """Raises StaleGraphError, by name, if a tensor that recordings use is not where it was."""
        self.store.recheck()
        for index in self.store.available():
            self.statics.verify(self.store.get(*index).addresses)

    def num_bytes(self) -> int:
        """What goes with this runner: recordings, state and buffers."""
        return self.store.bytes + self.state.num_bytes() + self.buffers.num_bytes()

    def enable_check(self, checker: StepChecker) -> None:
        self._checker = checker

    def observe(self, observer: StepObserver | None) -> None:
        """From the next launch on; None ends it. Nothing may be in flight."""
        self._observer = observer

    @property
    def attention_backend(self) -> str:
        """Of prompts, by vLLM's name."""
        if self.buffers.has_flash:
            return "FLASH_ATTN"
        return "TRITON_ATTN" if self._cuda else "CPU_ATTN"

    @property
    def num_checked(self) -> int:
        """Replays that were compared with an eager run, bit for bit."""
        return self._checker.num_checked if self._checker is not None else 0

    def close(self) -> None:
        """Destroys the recordings as one set. Nothing may be in flight."""
        if self._cuda:
            torch.cuda.synchronize()
        self.store.clear()
        self.backend.close()

    # -- one step ----------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> InFlight:
        """Stages the plan's differences and starts its step; does not wait for it."""
        try:
            return self._launch(plan)
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                self.history.report(error, "launch", plan)
            raise

    def _launch(self, plan: StepPlan) -> InFlight:
        shape = BatchShape(plan.num_tokens, plan.num_rows, plan.query_len)
        connector, meta = self._connector, plan.connector_meta
        decision = self._pick(shape, connector is not None and connector.requires_piecewise_for_cudagraph(meta))
        self.history.add(plan, decision)
        self.counters.record(decision, shape)
        self._stage(plan)
        if self._checker is not None:
            self._checker.follow(plan)
        self._live_rows = plan.num_rows
        if connector is not None:
            connector.start_load_kv(meta)
        if self._observer is None:
            self._run(decision, plan)
        else:
            self._observer.launching(plan, decision)
            self._run(decision, plan)
            self._observer.launched(plan)
        if connector is not None:
            connector.wait_for_save()
        wanted = tuple(self._wanted_logprobs[row.slot] for row in plan.rows) if self._any_logprobs else ()
        fetched = logprobs.fetch(self.buffers, plan.num_rows) if any(count >= 0 for count in wanted) else None
        prompt = self._prompt_logprobs(plan) if self._prompts else {}
        event = None
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
        ring_row = self._num_launched % self.buffers.ring_depth
        self._num_launched += 1
        return InFlight(plan, decision, ring_row, event, wanted, fetched, prompt)

    def _pick(self, shape: BatchShape, force_piecewise: bool) -> Decision:
        if self.storage.scales is not None and self.storage.scales.pending:
            # with ragged rows, whose keys are complete before the attention (`_calibrating`)
            key = BatchKey(shape.num_tokens, shape.num_rows, None)
            return Decision(RuntimeMode.NONE, key, Reason.CALIBRATES_KV)
        wanted = self.dispatcher.pick(shape, force_piecewise=force_piecewise)
        if self._available is None:
            return wanted
        decision = self.dispatcher.pick(shape, available=self._available, force_piecewise=force_piecewise)
        if wanted.key != decision.key or wanted.mode is not decision.mode:
            self._pending.ask(wanted.mode, wanted.key)
        return decision

    def collect(self, step: InFlight) -> StepResult:
        """Waits until the step is done; its tokens in the plan's row order."""
        try:
            return self._collect(step)
        except BaseException as error:  # on CUDA of the launch too: a fault is raised where the step is awaited
            if not isinstance(error, KeyboardInterrupt):
                self.history.report(error, "collect", step.plan)
            raise

    def _collect(self, step: InFlight) -> StepResult:
        if self._observer is not None:
            self._observer.waiting(step.plan)
        if step.event is not None:
            step.event.synchronize()
        if self._observer is not None:
            self._observer.collected(step.plan)
        ring = self.buffers.ring[step.ring_row]
        tokens = tuple(ring[: step.plan.num_rows].tolist())
        if _UNWRITTEN in tokens:
            raise StaleGraphError(
                f"step {step.plan.step_id} ({step.decision.mode.value}, {step.decision.key}) did not write its tokens"
            )
        ring.fill_(_UNWRITTEN)
        rows = step.fetched.rows(step.wanted, tokens) if step.fetched is not None else ()
        prompt = {name: part.rows() for name, part in step.prompt_logprobs.items()}
        return StepResult(tokens, rows, prompt or None)

    def _run(self, decision: Decision, plan: StepPlan) -> None:
        mode, key = decision.mode, decision.key
        if decision.reason is Reason.CALIBRATES_KV:
            scales = self.storage.scales
            assert scales is not None
            self._step(mode, key, self._calibrating(scales, key.num_tokens))
            scales.pending = False
        elif mode is RuntimeMode.NONE:
            self._step(mode, key, no_cut)
        elif self._checker is not None and self._checker.wants(decision):
            self.statics.verify(self.store.get(mode, key).addresses)
            self._checker.run(
                decision,
                plan,
                replay=lambda: self.store.replay(mode, key),
                eager=lambda: self._step(mode, key, no_cut),
                all_logits=not self.model.samples_in_head(self._head_rows(mode, key)),
            )
        else:
            self.store.replay(mode, key)

    def _step(self, mode: RuntimeMode, key: BatchKey, cut: Cut, num_layers: int | None = None) -> None:
        """The whole step: prepare, forward, logits, sample, advance. What a graph holds and is checked against.
        `num_layers`: of the first layers alone, to warm up."""
        ranges = self.model.ranges
        if ranges is None:
            self._launch_step(mode, key, cut, num_layers)
            return
        with ranges.named(f"{mode.value} {key.name}"):
            self._launch_step(mode, key, ranges.cuts(cut), num_layers)

    def _launch_step(self, mode: RuntimeMode, key: BatchKey, cut: Cut, num_layers: int | None) -> None:
        state, buffers, query_len = self.state, self.buffers, key.query_len or 0
        ops.prepare(
            state["row_slot"],
            state["query_start"],
            state["num_computed"],
            state["num_tokens"],
            state["tokens"],
            state["block_table"],
            query_len,
            key.num_rows,
            self._block_size,
            buffers.token_ids,
            buffers.positions,
            buffers.slot_mapping,
            buffers.seq_lens,
            buffers.logit_index,
        )
        attention, gathered = self._attention_args(key), buffers.work.gathered
        tables = (state["block_table"], state["row_slot"]) if gathered is None else gathered.tables
        rows = (buffers.seq_lens, state["query_start"], *tables)
        if attention.tiles is not None:
            ops.plan_tiles(*rows, query_len, key.num_rows, self._block_size, attention.tiles)
        if attention.flash is not None:
            singles = attention.tiles is None
            ops.plan_flash(*rows, key.num_rows, key.num_tokens, self._block_size, attention.flash, singles)
        if self._connector is not None:
            cut = self._with_connector(self._connector, mode, cut)
        self.model.forward(
            buffers.token_ids[: key.num_tokens],
            buffers.positions[: key.num_tokens],
            self.storage.layers,
            attention,
            buffers.work,
            cut,
            num_layers,
        )
        cut("head", lambda: self._head(self._head_rows(mode, key), query_len))

    def _head_rows(self, mode: RuntimeMode, key: BatchKey) -> int:
        """Run between graphs, the head need not pad its rows: it takes the live ones, whatever the key's limit."""
        return self._live_rows if mode is RuntimeMode.PIECEWISE else key.num_rows

    def _with_connector(self, connector: KVConnectorWorker, mode: RuntimeMode, cut: Cut) -> Cut:
        """A step waits for each layer's KV before it reads it: in the graph, and in host code where there is some."""
        layers = itertools.count()

        def wait_and_cut(name: str, op: Callable[[], None]) -> None:
            if name not in LAYER_CUTS:
                cut(name, op)
                return
            layer = next(layers)
            connector.wait_in_graph(layer)
            cut(name, op if mode is RuntimeMode.FULL else _BetweenHooks(connector, layer, op))

        return wait_and_cut

    def _calibrating(self, scales: KVScales, num_tokens: int) -> Cut:
        """Sets each layer's scales just before its keys and values are written, for the first time since they hold
        anything: there is nothing in the cache under other scales, and this step's attention reads what it wrote."""
        _, keys, values = self.model.split(self.buffers.work.qkv[:num_tokens])
        layers = itertools.count()

        def set_and_run(name: str, op: Callable[[], None]) -> None:
            if name in LAYER_CUTS:
                scales.calibrate(next(layers), keys, values, self.buffers.slot_mapping[:num_tokens] >= 0)
            op()

        return set_and_run

    def _head(self, num_rows: int, query_len: int) -> None:
        state, buffers = self.state, self.buffers
        if query_len == 1:  # every row's last token is its only one
            stream = buffers.work.stream[:num_rows]
        else:
            stream = buffers.work.stream.index_select(0, buffers.logit_index[:num_rows])
        logits = buffers.logits[:num_rows]
        row_slot = state["row_slot"][:num_rows]
        chosen = (buffers.adjusted, buffers.sampled)
        if self.model.samples_in_head(num_rows):
            self.model.sample(stream, row_slot, self._sampling, state["num_logprobs"], logits, *chosen)
        else:
            self.model.logits(stream, logits)
            ops.sample(logits, row_slot, self._sampling, *chosen)
        ops.logprobs(
            logits, row_slot, state["num_logprobs"], buffers.sampled, buffers.logprob_values, buffers.logprob_ids
        )
        ops.advance(
            state["row_slot"],
            state["query_start"],
            buffers.sampled,
            query_len,
            num_rows,
            state["tokens"],
            state["num_tokens"],
            state["num_computed"],
            state.output_counts,
            state["step_count"],
            buffers.ring,
        )

    def _attention_args(self, key: BatchKey) -> AttentionArgs:
        state, buffers, config = self.state, self.buffers, self.model.config
        num_splits = 1
        if key.query_len:
            width = state.layout.table_width
            num_splits = choose_num_splits(key.num_rows, config.num_kv_heads, width, self._num_sms)
        return AttentionArgs(
            block_table=state["block_table"],
            row_slot=state["row_slot"],
            query_start=state["query_start"],
            seq_lens=buffers.seq_lens,
            slot_mapping=buffers.slot_mapping,
            counters=buffers.attention_counters,
            tiles=self._tiles(key, num_splits),
            partials=buffers.attention_partials,
            num_rows=key.num_rows,
            query_len=key.query_len or 0,
            num_splits=num_splits,
            flash=self._flash(key),
            live_rows=lambda: self._live_rows,
        )

    def _tiles(self, key: BatchKey, num_splits: int) -> DecodeTiles | None:
        """Where rows of one token fill the device, and where they run beside prompts."""
        buffers, config = self.buffers, self.model.config
        if self.model.batch_invariant:
            return None
        if key.query_len:
            fill = num_splits == 1 and key.num_rows * config.num_kv_heads >= self._num_sms
            if key.query_len > 1 or not fill or buffers.work.gathered is not None:
                return None
        sizes = buffers.work.qkv.element_size(), self.storage.pool.element_size()
        gathered = buffers.work.gathered
        cache = self.storage.layers[0].keys if gathered is None else gathered.keys
        return buffers.decode_tiles(tile_config(config.head_dim, *sizes), config.num_kv_heads, block_cells(cache))

    def _flash(self, key: BatchKey) -> ops.FlashRows | None:
        """Where the key has room for more than a short prompt beside others."""
        if not self.buffers.has_flash or key.query_len or key.num_tokens < MIN_TOKENS:
            return None
        return self.buffers.flash_rows(key.num_rows)

    # -- the host's differences --------------------------------------------------------------------------------------

    def _stage(self, plan: StepPlan) -> None:
        """Everything that changed since the last step, in one patch list; nothing at all in steady decode."""
        resets = [admission for admission in plan.admissions if self._admit(admission)]
        for append in plan.appends:
            self._patches.append(append)
        for mask in plan.masks:
            self._patches.mask(mask)
        self._stage_rows(tuple((row.slot, row.num_tokens) for row in plan.rows), plan.num_tokens)
        self._patches.apply()
        for admission in resets:
            self.state.reset_penalties(admission)

    def _admit(self, admission: Admission) -> bool:
        params, slot = admission.params, admission.slot
        self._wanted_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._any_logprobs = any(count >= 0 for count in self._wanted_logprobs)
        self._prompts.pop(slot, None)
        if params.prompt_logprobs is not None:
            self._prompts[slot] = admission
        return self._patches.admit(admission)

    def _stage_rows(self, layout: tuple[tuple[int, int], ...], num_tokens: int) -> None:
        """`layout`: state row and number of tokens of each row of the step."""
        if layout == self._staged_rows:
            return
        self._staged_rows = layout
        row_slot = np.full_like(self._row_slot, self.state.layout.scratch)
        row_slot[: len(layout)] = [slot for slot, _ in layout]
        query_start = np.full_like(self._query_start, num_tokens)
        query_start[0] = 0
        query_start[1 : len(layout) + 1] = np.cumsum([count for _, count in layout])
        for name, old, new in (
            ("row_slot", self._row_slot, row_slot),
            ("query_start", self._query_start, query_start),
        ):
            self._patches.put_changes(self.state.layout.at(name), old, new)
        self._row_slot, self._query_start = row_slot, query_start

    def _prompt_logprobs(self, plan: StepPlan) -> dict[str, logprobs.PromptLogprobs]:
        found: dict[str, logprobs.PromptLogprobs] = {}
        first = 0
        for row in plan.rows:
            admission = self._prompts.get(row.slot)
            if admission is not None and admission.request_id == row.request_id:
                # position p predicts token p + 1, which must still be a token of the prompt
                count = min(row.num_tokens, admission.num_prompt_tokens - 1 - row.start)
                if count > 0:
                    targets = admission.token_ids[row.start + 1 : row.start + 1 + count]
                    stream = self.buffers.work.stream[first : first + count]
                    num_top = admission.params.prompt_logprobs or 0
                    found[row.request_id] = logprobs.prompt_logprobs(
                        self.model, stream, row.start + 1, targets, num_top
                    )
            first += row.num_tokens
        return found


@dataclass(frozen=True, slots=True)
class _BetweenHooks:
    connector: KVConnectorWorker
    layer: int
    op: Callable[[], None]

    def __call__(self) -> None:
        self.connector.wait_for_layer_load(self.layer)
        self.op()
        self.connector.save_kv_layer(self.layer)

    def prepare(self) -> Callable[[], None]:
        return replace(self, op=prepared(self.op))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _weight_getter(weights: DecoderWeights, name: str) -> Callable[[], torch.Tensor]:
    """Reads the parameter through its owner at every call, so that a rebound one is noticed."""
    owner_name, _, field = name.rpartition(".")
    if not owner_name:
        return lambda: cast(torch.Tensor, getattr(weights, field))
    layer = weights.layers[int(owner_name.split(".")[1])]
    return lambda: cast(torch.Tensor, getattr(layer, field))
