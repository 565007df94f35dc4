"""The trial cards that run on any device: the tape on the CPU, CUDA graphs where `device` says so.

Each function is one card; `options` go to the engine. Common setting: blocks of 16, context 256, 8 requests, ladder
[1, 2, 4, 8], 64 blocks, greedy, no stop at eos, one step in flight.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ostinato import LLM, SamplingParams, StaleGraphError
from ostinato.cli.recording_lines import Line, recording_lines
from ostinato.graphs.dispatch import Reason
from ostinato.graphs.mode import RuntimeMode
from ostinato.runner.inputs import StepBuffers
from ostinato.runner.runner import InFlight, Runner
from ostinato.step import StepPlan, StepResult

from .driving import ALWAYS, SeenStep, counts_of, drive, greedy
from .models import TinyModel, prompts_of

LADDER = [1, 2, 4, 8]
NAN = float("nan")
OUT_OF_RANGE = 0x3FFFFFFF
V = 160


def open_llm(model: TinyModel | Path, mode: str = "FULL_AND_PIECEWISE", **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 64,
        "enable_prefix_caching": False,
        "cudagraph_mode": mode,
        "max_in_flight": 1,
        **options,
    }
    return LLM(str(model.path if isinstance(model, TinyModel) else model), **settings)


def assert_greedy(model: TinyModel, prompt: Sequence[int], tokens: Sequence[int], tie: float) -> None:
    """Every token is the likeliest one, or lies within `tie` of it: what rounding on a device may change."""
    logits = model.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
    behind = logits.max(-1).values - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert behind.max() <= tie, f"token {int(behind.argmax())} is {float(behind.max())} behind the likeliest"


def assert_tails_are_pads(runner: Runner, step: SeenStep) -> None:
    """Every entry of every static input outside the live part of the step, and the whole scratch row."""
    state, buffers, plan = runner.state, runner.buffers, step.plan
    num_live = {name: plan.num_rows for name in ("seq_lens", "logit_index", "sampled")}
    num_live |= {name: plan.num_tokens for name in ("token_ids", "positions", "slot_mapping")}
    assert num_live.keys() == StepBuffers.pads.keys()
    for name, pad in StepBuffers.pads.items():
        tail = getattr(buffers, name)[num_live[name] :]
        assert torch.equal(tail, torch.full_like(tail, pad)), f"{name} after step {plan.step_id}"
    seen = set()
    for name, field in state.layout.fields.items():
        values = state[name]
        if field.per == "slot":
            seen.add(name)
            rest = values[state.layout.scratch]
            assert torch.equal(rest, torch.full_like(rest, field.pad)), f"{name} of the scratch row"
    assert {"block_table", "tokens", "num_tokens", "num_computed", "temperature", "flags"} <= seen
    scratch_rows = state["row_slot"][plan.num_rows :]
    assert torch.equal(scratch_rows, torch.full_like(scratch_rows, state.layout.scratch))
    ends = state["query_start"][plan.num_rows :]
    assert torch.equal(ends, torch.full_like(ends, plan.num_tokens))


def poison(llm: LLM) -> None:
    """NaN in every block that nobody can read, out-of-range ids in every derived input."""
    runner = llm.engine.runner
    runner.storage.fill_blocks([0, *llm.engine.scheduler.kv.empty_blocks()], NAN)
    for name in StepBuffers.pads:
        getattr(runner.buffers, name).fill_(OUT_OF_RANGE)
    for tensor in (runner.buffers.work.qkv, runner.buffers.work.attention_out, runner.buffers.work.stream):
        tensor.fill_(NAN)
    if runner.buffers.work.gathered is not None:
        runner.buffers.work.gathered.pool.fill_(NAN)


# -- long contexts -----------------------------------------------------------------------------------------------------

SPLIT_KERNELS = ("decode_fused_kernel", "decode_kernel")
"""Their grid's last number is into how many parts a decode step cuts each row's keys, which `choose_num_splits` takes
from the longest row there may be: more programs of a launch for a longer context, never more launches."""


def recordings_do_not_grow_with_the_context(model: TinyModel, max_model_lens: tuple[int, int], **options: Any) -> None:
    """Nodes, order, dependencies, blocks and grids of every recording are those of the shorter `max_model_len`, but for
    the parts of a row; so is what each segment is, graph or eager call."""
    found = []
    for max_model_len in max_model_lens:
        blocks = 1 + max_model_len // 16
        settings = {"max_model_len": max_model_len, "max_num_seqs": 4, "num_gpu_blocks_override": blocks, **options}
        with open_llm(model, cudagraph_capture_sizes=[1, 2, 4, 128], **settings) as llm:
            runner = llm.engine.runner
            found.append(
                {
                    (line.mode, line.key): recording_lines(
                        runner.store.get(line.mode, line.key), runner.model.config.num_layers
                    )
                    for line in runner.store.table()
                }
            )
    short, long = found
    assert short.keys() == long.keys()
    assert {key.query_len for _, key in short} == {1, None}, "decode and mixed steps"
    for index, lines in short.items():
        assert [_form(line) for line in lines] == [_form(line) for line in long[index]], index


def _form(line: Line) -> tuple[object, ...]:
    """All of a node that may not depend on the context; sizes of tables and workspaces may (`detail`)."""
    node = line.node
    grid = node.grid[:2] if node.grid is not None and node.name in SPLIT_KERNELS else node.grid
    return line.segment, node.layer, node.kind, node.name, grid, node.block, node.depends_on


# -- half-updated static state -----------------------------------------------------------------------------------------


def grow_then_shrink(model: TinyModel, mode: str, *, tie: float = 0.0, **options: Any) -> None:
    """8 requests of 120 tokens, then 5 of 3 and 40 more, tails poisoned between: Twin and tails at every step."""
    with open_llm(model, mode, cudagraph_capture_sizes=[*LADDER, 128], check=ALWAYS, **options) as llm:
        runner = llm.engine.runner

        def after(step: SeenStep) -> None:
            assert_tails_are_pads(runner, step)

        large = prompts_of((80,) * 8, 160, seed=40)
        grown = drive(llm, large, greedy(40), name="large", after_step=after)
        poison(llm)
        small = prompts_of((3,) * 5, 160, seed=41)
        shrunk = drive(llm, small, greedy(40), name="small", after_step=after)
        stats = llm.stats()
    for prompt, tokens in zip([large[0], *small], [grown.tokens[0], *shrunk.tokens], strict=True):
        assert len(tokens) == 40
        assert_greedy(model, prompt, tokens, tie)
    graph_steps = sum(row.count for row in stats.steps if row.mode != "NONE")
    assert stats.num_checked == graph_steps
    assert (graph_steps > 70) == (mode != "NONE")


def expected_counts(mode: str) -> dict[tuple[str, int | None, str], int]:
    """1 to 16 rows and back over the ladder [1, 2, 4, 8]: each count of rows comes twice."""
    if mode == "NONE":
        return {("NONE", None, Reason.GRAPHS_OFF.value): 32}
    whole = "PIECEWISE" if mode == "PIECEWISE" else "FULL"
    above = Reason.TOO_MANY_TOKENS if mode == "PIECEWISE" else Reason.TOO_MANY_ROWS
    exact = {(whole, size, Reason.EXACT.value): 2 for size in LADDER}
    padded = {(whole, 4, Reason.PADDED.value): 2, (whole, 8, Reason.PADDED.value): 6}
    return exact | padded | {("NONE", None, above.value): 16}


def every_count(model: TinyModel, mode: str, *, tie: float = 0.0, **options: Any) -> None:
    """Prompts of one token arrive one a step and end one a step; the limit is twice the ladder's end."""
    prompts = prompts_of((1,) * 16, 160, seed=42)
    params = [greedy(34 - 2 * arrival) for arrival in range(1, 17)]
    with open_llm(model, mode, max_num_seqs=16, cudagraph_capture_sizes=LADDER, check=2, **options) as llm:
        seen = drive(llm, prompts, params, arrivals=range(16))
        assert counts_of(llm) == expected_counts(mode)
    assert [step.plan.num_rows for step in seen.steps] == [*range(1, 17), *range(16, 0, -1)]
    assert all(bool(step.logits.isfinite().all()) for step in seen.steps)
    for prompt, one, tokens in zip(prompts, params, seen.tokens, strict=True):
        assert_greedy(model, prompt, tokens, tie)
        assert len(tokens) == one.max_tokens


# -- padded rows and real KV -------------------------------------------------------------------------------------------


def nan_pool(model: TinyModel, mode: str, *, tie: float = 0.0, **options: Any) -> None:
    """The pool and all inputs are NaN before the start and what is free again after each finish; lengths 1 to 33."""
    prompts = prompts_of(range(1, 34), 160, seed=43)
    with open_llm(model, mode, max_num_seqs=3, cudagraph_capture_sizes=[1, 2, 3, 64], **options) as llm:
        llm.engine.runner.storage.pool.fill_(NAN)
        poison(llm)
        num_running = 0

        def after(step: SeenStep) -> None:
            nonlocal num_running
            assert bool(step.logits.isfinite().all()), step.plan
            if llm.engine.scheduler.num_running != num_running:
                poison(llm)
            num_running = llm.engine.scheduler.num_running

        seen = drive(llm, prompts, [greedy(2 + index % 5) for index in range(33)], after_step=after)
    for prompt, tokens in zip(prompts, seen.tokens, strict=True):
        assert_greedy(model, prompt, tokens, tie)


def changed_cells(before: torch.Tensor, after: torch.Tensor) -> set[int]:
    """Slots of the pool [N, L, 2, B, G, D] whose bytes differ."""
    differs = (before.view(torch.int32) != after.view(torch.int32)).transpose(1, 3).flatten(2).any(-1)
    return set(differs.flatten().nonzero().flatten().tolist())


def who_wrote_what(model: TinyModel, mode: str, **options: Any) -> None:
    """Recording again, a dummy step and padded steps: only live slots change, and the scratch block may.

    One request owns the first block that can be handed out; row 1 of 4 finishes first, which leaves 3 rows at key 4.
    """
    with open_llm(model, mode, cudagraph_capture_sizes=[*LADDER, 128], **options) as llm:
        runner, pool = llm.engine.runner, llm.engine.runner.storage.pool
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(0)))
        state = runner.state.arena.clone()

        before = pool.clone()
        runner.store.clear()
        runner.record()
        assert not changed_cells(before, pool), "recording wrote to the KV cache"
        runner.warm_up()
        assert changed_cells(before, pool) <= set(range(16)), "a step of padding wrote to the KV cache"
        runner.reset_step_count()
        assert torch.equal(runner.state.arena, state), "recording and a step of padding left traces in the state"

        owners: list[bool] = []
        snapshot = pool.clone()

        def after(step: SeenStep) -> None:
            nonlocal snapshot
            live = runner.buffers.slot_mapping[: step.plan.num_tokens].tolist()
            assert len(set(live)) == step.plan.num_tokens
            assert min(live) >= 16, "a live token went to the scratch block"
            assert {slot for slot in changed_cells(snapshot, pool) if slot >= 16} == set(live)
            table = runner.state["block_table"]
            owners.append(any(1 in table[row.slot].tolist() for row in step.plan.rows))
            snapshot = pool.clone()

        params = [greedy(20), greedy(5), greedy(20), greedy(20)]
        seen = drive(llm, prompts_of((15, 30, 1, 20), 160, seed=44), params, after_step=after)
    assert any(owners)
    if mode not in ("NONE",):
        assert any(step.plan.num_rows == 3 and step.decision.key.num_tokens == 4 for step in seen.steps)


# -- a silent slow path ------------------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def over_the_ceiling(model: TinyModel, caplog: pytest.LogCaptureFixture, **options: Any) -> None:
    """A ladder that ends at 8 with a limit of 64: one warning that names both, counters, and recovery."""
    caplog.set_level(logging.INFO, logger="ostinato")
    with open_llm(
        model, max_num_seqs=64, num_gpu_blocks_override=200, cudagraph_capture_sizes=LADDER, **options
    ) as llm:
        params = [greedy(40)] * 6 + [greedy(8)] * 6 + [greedy(6)] * 6
        arrivals = [0] * 6 + [5] * 6 + [20] * 6
        seen = drive(llm, prompts_of((1,) * 18, 160, seed=46), params, arrivals=arrivals)
        counted = counts_of(llm)
    (warning,) = warnings_of(caplog)
    assert "8" in warning
    assert "64" in warning
    assert "cudagraph_capture_sizes" in warning
    for step in seen.steps:
        rows = step.plan.num_rows
        assert (step.decision.mode is RuntimeMode.NONE) == (rows > 8), f"{rows} rows: {step.decision}"
    assert counted["NONE", None, Reason.TOO_MANY_ROWS.value] == 14
    assert seen.steps[-1].decision.mode is RuntimeMode.FULL, "it did not recover"


# -- mixed steps -------------------------------------------------------------------------------------------------------


def mixed_steps_equal_solo(llm: LLM, solo: LLM, *, tolerance: float = 1e-4) -> None:
    """A prompt of 1000 in chunks of 128 beside 3 rows that decode: log-probabilities of every token as alone.

    `llm` runs 131 tokens a step, `solo` one request at a time, eagerly, in one piece.
    """
    prompts = prompts_of((7, 20, 33, 1000), 160, seed=47)
    params = [greedy(30, logprobs=3)] * 4
    num_recordings = llm.stats().num_recordings
    seen = drive(llm, prompts, params, arrivals=(0, 0, 0, 4))
    mixed = [step for step in seen.steps if step.plan.query_len is None]
    chunks = [row.num_tokens for step in mixed for row in step.plan.rows if row.request_id == "r-3"]
    assert chunks == [128] * 7 + [104]
    assert all(step.decision.mode is not RuntimeMode.FULL for step in mixed), "a decode graph ran a mixed step"
    assert any(step.decision.mode is RuntimeMode.FULL for step in seen.steps)
    assert llm.stats().num_recordings == num_recordings
    assert llm.engine.runner.store.sealed
    for prompt, one, output in zip(prompts, params, seen.outputs, strict=True):
        alone = solo.generate([prompt], one)[0].outputs[0]
        assert output.request.output_token_ids == alone.token_ids
        assert alone.logprobs is not None
        for ours, theirs in zip(output.logprobs, alone.logprobs, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(ours[token].logprob == pytest.approx(theirs[token].logprob, abs=tolerance) for token in ours)


def small_llm(model: TinyModel | Path, mode: str = "FULL_AND_PIECEWISE", **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 40,
        "enable_prefix_caching": False,
        "cudagraph_mode": mode,
        "max_in_flight": 1,
        **options,
    }
    return LLM(str(model.path if isinstance(model, TinyModel) else model), **settings)


PROMPTS = prompts_of((5, 18, 9), V, seed=50)


def tokens_of(llm: LLM, num_tokens: int = 12) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy(num_tokens))]


# -- weights -----------------------------------------------------------------------------------------------------------


def updated(path: Path, folder: Path, updates: dict[str, Callable[[torch.Tensor], torch.Tensor]]) -> Path:
    """A copy of the checkpoint with some tensors changed."""
    other = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tensors = dict(other.named_parameters())
    with torch.no_grad():
        for name, change in updates.items():
            tensors[name].copy_(change(tensors[name].clone()))
    other.save_pretrained(folder)
    return folder


def weights_in_place_then_rebound(model: TinyModel, mode: str, folder: Path, **options: Any) -> None:
    """The fused QKV, the head (cast from another type) and a norm in place: as a fresh engine each time. Then one
    tensor rebound: refused by name.

    The model has biases.
    """
    path = model.path
    with small_llm(model, mode, **options) as llm:
        weights, config = llm.engine.runner.model.weights, llm.engine.runner.model.config
        seen = [tokens_of(llm)]
        updates: list[tuple[torch.Tensor, dict[str, Callable[[torch.Tensor], torch.Tensor]]]] = [
            (
                weights.layers[0].qkv[: config.query_size],
                {"model.layers.0.self_attn.q_proj.weight": lambda w: -w.flip(0)},
            ),
            (weights.head, {"lm_head.weight": lambda w: w.flip(0).bfloat16()}),
            (weights.layers[1].post_norm, {"model.layers.1.post_attention_layernorm.weight": lambda w: w * 2 - 1}),
        ]
        for index, (tensor, change) in enumerate(updates):
            path = updated(path, folder / str(index), change)
            with torch.no_grad():
                tensor.copy_(next(iter(change.values()))(tensor.clone()))
            seen.append(tokens_of(llm))
            with small_llm(path, mode, **options) as fresh:
                assert seen[-1] == tokens_of(fresh), f"update {index}"
        assert len({repr(tokens) for tokens in seen}) == 4, "an update changed nothing: the test sees nothing"

        weights.layers[1].qkv = weights.layers[1].qkv.clone()
        llm.engine.runner.store.recheck()
        with pytest.raises(StaleGraphError, match=r"weights\.layers\.1\.qkv"):
            llm.generate(PROMPTS, greedy(5))


# -- faults put in on purpose ------------------------------------------------------------------------------------------


def run_until_decoding(llm: LLM, num_tokens: int = 3) -> list[str]:
    names = [f"victim-{index}" for index in range(3)]
    states = [llm.engine.add_request(name, prompt, greedy(60)) for name, prompt in zip(names, PROMPTS, strict=True)]
    while any(state.num_tokens < num_tokens for state in states):
        llm.engine.step()
    return names


CORRUPTIONS = {
    "table-free-block": ("block_table", 0, 30),
    "table-scratch": ("block_table", 1, 0),
    "position": ("num_computed", None, 2),
    "token": ("tokens", 4, 3),
}
"""Field of the state, column, value."""


def corrupted_word(model: TinyModel, mode: str, field: str, column: int | None, value: int, **options: Any) -> None:
    """One entry of one row's state on the device: the error names request, row and field."""
    with small_llm(model, mode, check=ALWAYS, **options) as llm:
        names = run_until_decoding(llm)
        request = llm.engine.scheduler.get(names[1])
        assert request is not None
        assert request.slot is not None
        entry = llm.engine.runner.state[field][request.slot]
        if column is None:
            entry.fill_(value)
        else:
            assert int(entry[column]) != value
            entry[column] = value
        with pytest.raises(StaleGraphError) as caught:
            llm.engine.step()
    message = str(caught.value)
    assert names[1] in message
    assert f"row {request.slot}" in message or "row 1" in message
    assert field in message


# -- fences ------------------------------------------------------------------------------------------------------------


class Fences:
    """Watches launches and collects: a block in a launched step's tables belongs to that step's request until the step
    has been collected."""

    def __init__(self, llm: LLM) -> None:
        self.num_steps = 0
        self.most_in_flight = 0
        self._scheduler, self._runner = llm.engine.scheduler, llm.engine.runner
        self._in_flight: dict[int, dict[int, str]] = {}  # step -> block -> request
        self._launch, self._collect = self._runner.launch, self._runner.collect
        self._runner.launch, self._runner.collect = self.launch, self.collect  # type: ignore[method-assign]

    def launch(self, plan: StepPlan) -> InFlight:
        owners: dict[int, str] = {}
        for row in plan.rows:
            for block in self._scheduler.kv.table(row.request_id):
                assert owners.setdefault(block, row.request_id) == row.request_id, f"block {block} has two owners"
        for handed_out in self._in_flight.values():
            for block, owner in owners.items():
                assert handed_out.get(block, owner) == owner, f"block {block} was handed out before its fence"
        slots = Counter(row.slot for row in plan.rows)
        assert max(slots.values()) == 1
        self._in_flight[plan.step_id] = owners
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        self.num_steps += 1
        return self._launch(plan)

    def collect(self, step: InFlight) -> StepResult:
        result = self._collect(step)
        del self._in_flight[step.plan.step_id]
        if self.num_steps % 16 == 0:
            self._scheduler.check_integrity()
        return result


def delay_copies(llm: LLM, wait: Callable[[], None]) -> None:
    patches = llm.engine.runner._patches
    apply = patches.apply

    def late() -> None:
        if patches._count:
            wait()
        apply()

    patches.apply = late  # type: ignore[method-assign]


def overlap_run(
    model: TinyModel,
    mode: str,
    max_in_flight: int,
    num_requests: int,
    wait: Callable[[], None] | None = None,
    **options: Any,
) -> tuple[list[list[int]], Fences, int]:
    """A pool for 3.5 requests of usual length, more rows than that, ends by chance. `wait` comes before each copy of
    the host's differences to the device."""
    chance = random.Random(7)
    prompts = prompts_of([chance.randint(1, 40) for _ in range(num_requests)], V, seed=51)
    params = [
        SamplingParams(
            temperature=chance.choice([0.0, 0.0, 1.0]),
            seed=index,
            max_tokens=chance.randint(1, 60),
            stop_token_ids=chance.sample(range(1, V), 2),
        )
        for index in range(num_requests)
    ]
    # 20 tokens of prompt and 25 of output: 3 blocks, three and a half times that, and the scratch block
    settings = {"num_gpu_blocks_override": 1 + 11, "max_num_seqs": 8, "max_in_flight": max_in_flight}
    with small_llm(model, mode, **settings, **options) as llm:
        fences = Fences(llm)
        if wait is not None:
            delay_copies(llm, wait)
        states = []
        while len(states) < num_requests or llm.engine.has_unfinished:
            while len(states) < num_requests and llm.engine.scheduler.num_waiting < 3:
                index = len(states)
                states.append(llm.engine.add_request(f"r-{index}", prompts[index], params[index]))
            llm.engine.step()
        stats = llm.stats()
        llm.engine.scheduler.check_integrity()
    assert stats.free_blocks == 11
    return [state.request.output_token_ids for state in states], fences, stats.preemptions


def overlap_equals_one_step_in_flight(
    model: TinyModel, mode: str, num_requests: int, wait: Callable[[], None] | None = None, **options: Any
) -> int:
    """Returns the steps of the second run, at least 7 for each request."""
    one, fences_one, _ = overlap_run(model, mode, 1, num_requests, **options)
    two, fences_two, preemptions = overlap_run(model, mode, 2, num_requests, wait, **options)
    assert one == two
    assert (fences_one.most_in_flight, fences_two.most_in_flight) == (1, 2)
    assert fences_two.num_steps > 7 * num_requests
    assert preemptions > 0
    assert len({len(tokens) for tokens in two}) > 10
    return fences_two.num_steps
