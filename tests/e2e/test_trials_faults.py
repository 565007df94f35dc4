"""The trials of other engines' users, on the tape backend: addresses, weights, fences, and faults put in on purpose."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ostinato import LLM, SamplingParams, StaleGraphError
from ostinato.graphs.mode import RuntimeMode
from ostinato.runner.runner import InFlight
from ostinato.step import StepPlan, StepResult

from .conftest import TinyFactory
from .driving import ALWAYS, greedy
from .models import TinyModel, prompts_of

V = 160


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Llama", attention_bias=True)


def open_llm(model: TinyModel | Path, mode: str = "FULL_AND_PIECEWISE", **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 40,
        "enable_prefix_caching": False,
        "cudagraph_mode": mode,
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


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_weights_in_place_then_rebound(model: TinyModel, mode: str, tmp_path: Path) -> None:
    """The fused QKV, the head and a norm in place: as a fresh engine each time. Then one tensor rebound: refused."""
    path = model.path
    with open_llm(model, mode) as llm:
        weights, config = llm.engine.runner.model.weights, llm.engine.runner.model.config
        seen = [tokens_of(llm)]
        updates: list[tuple[torch.Tensor, dict[str, Callable[[torch.Tensor], torch.Tensor]]]] = [
            (
                weights.layers[0].qkv[: config.query_size],
                {"model.layers.0.self_attn.q_proj.weight": lambda w: -w.flip(0)},
            ),
            (weights.head, {"lm_head.weight": lambda w: w.flip(0)}),
            (weights.layers[1].post_norm, {"model.layers.1.post_attention_layernorm.weight": lambda w: w * 2 - 1}),
        ]
        for index, (tensor, change) in enumerate(updates):
            path = updated(path, tmp_path / str(index), change)
            with torch.no_grad():
                tensor.copy_(next(iter(change.values()))(tensor.clone()))
            seen.append(tokens_of(llm))
            with open_llm(path, mode) as fresh:
                assert seen[-1] == tokens_of(fresh), f"update {index}"
        assert len({repr(tokens) for tokens in seen}) == 4, "an update changed nothing: the test sees nothing"

        weights.layers[1].qkv = weights.layers[1].qkv.clone()
        llm.engine.runner.store.recheck()
        with pytest.raises(StaleGraphError, match=r"weights\.layers\.1\.qkv"):
            llm.generate(PROMPTS, greedy(5))


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


def run_until_decoding(llm: LLM, num_tokens: int = 3) -> list[str]:
    names = [f"victim-{index}" for index in range(3)]
    states = [llm.engine.add_request(name, prompt, greedy(60)) for name, prompt in zip(names, PROMPTS, strict=True)]
    while any(state.num_tokens < num_tokens for state in states):
        llm.engine.step()
    return names


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize(
    ("field", "column", "value"),
    [("block_table", 0, 30), ("block_table", 1, 0), ("num_computed", None, 2), ("tokens", 4, 3)],
    ids=["table-free-block", "table-scratch", "position", "token"],
)
def test_a_corrupted_word_of_the_state_is_named(
    model: TinyModel, mode: str, field: str, column: int | None, value: int
) -> None:
    """One entry of one row's state on the device: the error names request, row and field."""
    with open_llm(model, mode, check=ALWAYS) as llm:
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


def overlap_run(
    model: TinyModel, mode: str, max_in_flight: int, num_requests: int
) -> tuple[list[list[int]], Fences, int]:
    """A pool for 3.5 requests of usual length, more rows than that, ends by chance."""
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
    with open_llm(model, mode, num_gpu_blocks_override=1 + 11, max_num_seqs=8, max_in_flight=max_in_flight) as llm:
        fences = Fences(llm)
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


@pytest.mark.parametrize(("mode", "num_requests"), [("NONE", 30), ("FULL_AND_PIECEWISE", 170)])
def test_overlap_equals_one_step_in_flight(model: TinyModel, mode: str, num_requests: int) -> None:
    one, fences_one, _ = overlap_run(model, mode, 1, num_requests)
    two, fences_two, preemptions = overlap_run(model, mode, 2, num_requests)
    assert one == two
    assert (fences_one.most_in_flight, fences_two.most_in_flight) == (1, 2)
    assert fences_two.num_steps > 7 * num_requests
    assert preemptions > 0
    assert len({len(tokens) for tokens in two}) > 10


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
