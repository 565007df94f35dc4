"""`cudagraph_cut="kv_gather"`: the cache is read between graphs, attention stays in them. The tokens are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import LLM, CapacityError, ConfigError, StaleGraphError
from ostinato.engine.build import Built
from ostinato.graphs.mode import RuntimeMode
from ostinato.graphs.recorder import EagerSegment, GraphSegment, Recording
from ostinato.kernels import ops
from ostinato.runner import memory
from ostinato.runner.inputs import GatherShape

from . import cards
from .conftest import TinyFactory
from .driving import ALWAYS, MODES, counts_of, drive, greedy, modes_of
from .models import TinyModel, prompts_of
from .test_oracle import assert_agrees, assert_checked, open_llm

GATHER: dict[str, Any] = {"cudagraph_cut": "kv_gather"}
PROMPTS = prompts_of((5, 17, 33, 1, 16, 48), 160, seed=90)


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Qwen3", num_hidden_layers=3)


@pytest.fixture(scope="module")
def llama(tiny_model: TinyFactory) -> TinyModel:
    """The trials' own."""
    return tiny_model("Llama", max_position_embeddings=2048)


def recording_of(llm: LLM, mode: RuntimeMode) -> Recording:
    store = llm.engine.runner.store
    return store.get(*next(index for index in store.available() if index[0] is mode))


def names_of(segment: GraphSegment) -> list[str]:
    return [node.name.removeprefix("ostinato.") for node in segment.graph.nodes()]


# -- the same tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_oracle_and_the_other_cut_agree(model: TinyModel, mode: str) -> None:
    """Every logit against transformers, and every step's logits against the other cut, bit for bit."""
    seen = {}
    for cut in ("attention", "kv_gather"):
        with open_llm(model, mode, cudagraph_cut=cut, check=ALWAYS) as llm:
            seen[cut] = drive(llm, PROMPTS, greedy(12), arrivals=(0, 0, 0, 2, 5, 5))
            assert_checked(llm, mode)
    assert_agrees(model, seen["kv_gather"])
    assert seen["kv_gather"].tokens == seen["attention"].tokens
    for ours, theirs in zip(seen["kv_gather"].steps, seen["attention"].steps, strict=True):
        assert ours.decision == theirs.decision, "the cut is no part of the dispatch"
        assert torch.equal(ours.logits, theirs.logits)


@pytest.mark.parametrize("mode", MODES)
def test_chunks_prefix_hits_and_preemption(model: TinyModel, mode: str) -> None:
    prompts = prompts_of((70, 48, 37), 160, seed=91)
    with open_llm(model, mode, check=ALWAYS, max_num_batched_tokens=13, num_gpu_blocks_override=13, **GATHER) as llm:
        first = drive(llm, prompts, greedy(41), name="first")
        again = drive(llm, prompts[1:], greedy(8), name="again")
        assert_agrees(model, first)
        assert_agrees(model, again)
        assert_checked(llm, mode)
        stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert any(not row.samples for step in first.steps for row in step.plan.rows), "no prompt was cut"


@pytest.mark.parametrize("mode", MODES)
def test_fp8(model: TinyModel, mode: str) -> None:
    """Gathered as stored, calibrated by the first step: what the other cut gives."""
    seen = {}
    for cut in ("attention", "kv_gather"):
        with open_llm(model, mode, cudagraph_cut=cut, check=ALWAYS, kv_cache_dtype="fp8") as llm:
            seen[cut] = drive(llm, PROMPTS, greedy(12))
            assert_checked(llm, mode)
            scales = llm.engine.runner.storage.scales
            assert scales is not None and not scales.values.eq(1).any()
            gathered = llm.engine.runner.buffers.work.gathered
            assert (gathered is None) == (cut == "attention")
            assert gathered is None or gathered.pool.dtype is torch.float8_e4m3fn
    assert seen["kv_gather"].tokens == seen["attention"].tokens
    for ours, theirs in zip(seen["kv_gather"].steps, seen["attention"].steps, strict=True):
        assert torch.equal(ours.logits, theirs.logits)


def test_another_format_at_run_time(model: TinyModel) -> None:
    with open_llm(model, "FULL_AND_PIECEWISE", check=ALWAYS, **GATHER) as llm:
        before = drive(llm, PROMPTS, greedy(6)).tokens
        llm.reconfigure(kv_cache_dtype="fp8")
        drive(llm, PROMPTS, greedy(6), name="fp8")
        llm.reconfigure(kv_cache_dtype="auto", max_num_seqs=6)
        gathered = llm.engine.runner.buffers.work.gathered
        assert gathered is not None and gathered.row_slot.tolist() == list(range(6))
        assert drive(llm, PROMPTS, greedy(6), name="again").tokens == before


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_batch_invariant(model: TinyModel, mode: str) -> None:
    """The same kernel over the same values in the same tiles: the bits of one request alone, under the other cut."""
    found = []
    for cut, max_num_seqs, tokens in (("attention", 1, 64), ("kv_gather", 1, 64), ("kv_gather", 5, 13)):
        with open_llm(
            model,
            mode,
            cudagraph_cut=cut,
            check=1,
            batch_invariant=True,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=tokens,
        ) as llm:
            outputs = llm.generate(PROMPTS, greedy(6, logprobs=2))
        found.append(
            [
                [(token, entry.logprob) for row in output.outputs[0].logprobs or () for token, entry in row.items()]
                for output in outputs
            ]
        )
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("wait", ["step", "hooks", "events"])
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_connectors(model: TinyModel, mode: str, wait: str) -> None:
    """A layer's KV is there before it is gathered: what comes back from host memory gives the same tokens."""
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24, "wait": wait},
    }
    prompts = prompts_of((70, 90, 80, 75), 160, seed=92)
    with open_llm(model, mode, check=ALWAYS, num_gpu_blocks_override=16, kv_transfer_config=transfer, **GATHER) as llm:
        first, second = ([llm.generate(prompt, greedy(5))[0].outputs[0].token_ids for prompt in prompts] for _ in "12")
        connector = llm.stats().connector
        assert connector is not None and connector.hit_tokens > 0
    assert first == second == [model.greedy(prompt, 5) for prompt in prompts]


# -- trials ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_nan_pool(llama: TinyModel, mode: str) -> None:
    cards.nan_pool(llama, mode, **GATHER)


@pytest.mark.parametrize("mode", MODES)
def test_who_wrote_what(llama: TinyModel, mode: str) -> None:
    cards.who_wrote_what(llama, mode, **GATHER)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_grow_then_shrink(llama: TinyModel, mode: str) -> None:
    cards.grow_then_shrink(llama, mode, **GATHER)


@pytest.mark.parametrize("mode", MODES)
def test_every_count(llama: TinyModel, mode: str) -> None:
    cards.every_count(llama, mode, **GATHER)


def test_a_gather_that_leaves_a_row_out_is_noticed(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ops.gather_blocks

    def all_but_the_last_row(*args: Any) -> None:
        whole(*args[:5], args[5] - 1, *args[6:])

    with open_llm(model, "PIECEWISE", check=ALWAYS, **GATHER) as llm:
        monkeypatch.setattr(ops, "gather_blocks", all_but_the_last_row)
        with pytest.raises(StaleGraphError, match=r"request r-1, row 1, .*logits are NaN"):
            drive(llm, prompts_of((16, 16), 160), greedy(3))


def test_a_workspace_that_moved_is_named(model: TinyModel) -> None:
    with open_llm(model, "PIECEWISE", **GATHER) as llm:
        names = {name for name, _ in llm.engine.runner.buffers.named()}
        assert {f"work.gathered.{name}" for name in ("pool", "block_table", "row_slot")} <= names
        assert llm.engine.runner.statics.addresses().keys() >= names


# -- where the cut is --------------------------------------------------------------------------------------------------


def test_piecewise_has_attention_in_its_graphs(model: TinyModel) -> None:
    with open_llm(model, "FULL_AND_PIECEWISE", **GATHER) as llm:
        drive(llm, PROMPTS, greedy(4))
        assert modes_of(llm) == {"FULL", "PIECEWISE"}
        segments = recording_of(llm, RuntimeMode.PIECEWISE).segments
        whole = recording_of(llm, RuntimeMode.FULL).segments
    eager = [segment.name for segment in segments if isinstance(segment, EagerSegment)]
    assert eager == ["kv_gather"] * 3 + ["head"]
    graphs = [names_of(segment) for segment in segments if isinstance(segment, GraphSegment)]
    assert [names.count("attention") for names in graphs] == [0, 1, 1, 1]
    assert [names.count("rope") for names in graphs] == [1, 1, 1, 0]
    assert not any(name in ("kv_write", "gather_blocks", "decode_attention") for names in graphs for name in names)
    (graph,) = [names_of(segment) for segment in whole if isinstance(segment, GraphSegment)]
    assert len(whole) == 1
    for name in ("kv_write", "gather_blocks", "attention"):
        assert graph.count(name) == 3
    assert "decode_attention" not in graph


def test_the_default_has_no_workspace(model: TinyModel) -> None:
    with open_llm(model, "PIECEWISE") as llm:
        assert llm.engine.runner.buffers.work.gathered is None
        assert llm.engine.runner.buffers.gather_bytes == 0
        segments = recording_of(llm, RuntimeMode.PIECEWISE).segments
        assert [s.name for s in segments if isinstance(s, EagerSegment)] == ["attention"] * 3 + ["head"]
        assert not counts_of(llm)


# -- what it takes -----------------------------------------------------------------------------------------------------


def built_of(llm: LLM) -> Built:
    built: Built = llm._require()
    return built


def test_bytes_are_counted(model: TinyModel) -> None:
    sizes = {}
    for cut in ("attention", "kv_gather"):
        with open_llm(model, "NONE", cudagraph_cut=cut, max_model_len=100) as llm:
            sizes[cut] = built_of(llm).memory().buffers
            gather_bytes = llm.engine.runner.buffers.gather_bytes
            config = llm.engine.runner.model.config
    # rows, tokens up to whole blocks, K and V, heads, head size, float32
    assert gather_bytes == 4 * 112 * 2 * 2 * 16 * 4 == GatherShape(7, 16, torch.float32).num_bytes(config, 4)
    tables = 4 * 7 * 4 + 4 * 4
    assert sizes["kv_gather"] - sizes["attention"] == gather_bytes + tables


def test_too_large_a_workspace_is_refused_with_numbers(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.os, "sysconf", lambda name: 1 << 10)  # as many pages of as many bytes
    with pytest.raises(
        CapacityError,
        match="max_num_seqs x max_model_len = 64 x 128 tokens, 2 MiB, and 1 MiB is all there is on cpu: lower one",
    ):
        open_llm(model, "NONE", max_num_seqs=64, max_num_batched_tokens=64, **GATHER)


def test_of_a_device_what_is_free_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device_memory", lambda device, trim: memory.DeviceMemory(5 << 20, 9 << 20))
    memory.require_gather_room(5 << 20, 8, 256, torch.device("cuda"))
    with pytest.raises(CapacityError, match=r"8 x 256 tokens, 6 MiB, and 5 MiB are free on cuda: .*='attention'"):
        memory.require_gather_room(6 << 20, 8, 256, torch.device("cuda"))


def test_unknown_places_are_refused(model: TinyModel) -> None:
    with pytest.raises(ConfigError, match="cudagraph_cut='gather': must be one of attention, kv_gather"):
        open_llm(model, "PIECEWISE", cudagraph_cut="gather")
