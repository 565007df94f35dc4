"""Host memory behind the prefix cache, on the tape backend: what is loaded is what would have been computed."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from ostinato import LLM, ConfigError
from ostinato.connectors.protocol import ConnectorStats, Wait
from ostinato.errors import EngineDeadError
from ostinato.kernels import ops

from .conftest import TinyFactory
from .driving import ALWAYS, counts_of, greedy, launches
from .models import TinyModel, prompts_of

WAITS = [wait.value for wait in Wait]


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Qwen3", num_hidden_layers=3)


def open_llm(model: TinyModel, *, wait: str = "events", host_bytes: int = 1 << 24, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 16,
        "check": ALWAYS,
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes, "wait": wait},
        },
        **options,
    }
    return LLM(str(model.path), **settings)


def stats_of(llm: LLM) -> ConnectorStats:
    stats = llm.stats().connector
    assert stats is not None
    return stats


LONG = prompts_of((70, 90, 80, 75), 160, seed=80)


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_what_the_pool_forgets_comes_back(model: TinyModel, mode: str, wait: str) -> None:
    """A pool for two prompts, four of them in turn, twice: the second time all but the last block are loaded."""
    with open_llm(model, cudagraph_mode=mode, wait=wait) as llm:
        first = [llm.generate(prompt, greedy(5))[0] for prompt in LONG]
        assert stats_of(llm).saved_blocks > 0
        assert stats_of(llm).hit_tokens == 0
        second = [llm.generate(prompt, greedy(5))[0] for prompt in LONG]
        for prompt, one, two in zip(LONG, first, second, strict=True):
            assert one.outputs[0].token_ids == two.outputs[0].token_ids == model.greedy(prompt, 5)
            assert two.num_cached_tokens == (len(prompt) - 1) // 16 * 16
        assert stats_of(llm).loaded_blocks >= 4 + 5 + 4
        llm.engine.scheduler.check_integrity()


def slow_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Copies of single layers, which loads are, begin 50 ms late. Returns the layers, as they are copied."""
    original, layers = ops.copy_blocks, []

    def copy_blocks(source: Any, target: Any, source_ids: Any, target_ids: Any, first: int, num_layers: int) -> None:
        if num_layers == 1:
            time.sleep(0.05)
            layers.append(first)
        original(source, target, source_ids, target_ids, first, num_layers)

    monkeypatch.setattr(ops, "copy_blocks", copy_blocks)
    return layers


@pytest.mark.parametrize("wait", WAITS)
def test_a_slow_loader_is_waited_for(model: TinyModel, wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 ms a layer, on a prompt that hits entirely, beside others that decode. A graph that waits by events stays
    whole; host hooks make this one step, and no other, PIECEWISE."""
    prompt = prompts_of((65,), 160, seed=81)[0]
    others = prompts_of((5, 9), 160, seed=82)
    with open_llm(model, wait=wait, num_gpu_blocks_override=14) as llm:
        expected = llm.generate(prompt, greedy(6))[0].outputs[0].token_ids
        for other in LONG:  # which take the pool
            llm.generate(other, greedy(3))
        states = [llm.engine.add_request(f"o{i}", other, greedy(20)) for i, other in enumerate(others)]
        while min(state.num_tokens for state in states) < 4:
            llm.engine.step()
        late = slow_copies(monkeypatch)
        with launches(llm) as launched:
            hit = llm.engine.add_request("hit", prompt, greedy(6))
            while llm.engine.has_unfinished:
                llm.engine.step()
        (loading,) = [step for step in launched if step.plan.connector_meta and step.plan.connector_meta.loads]  # type: ignore[attr-defined]
        assert [row.num_tokens for row in loading.plan.rows] == [1, 1, 1]
        assert loading.decision.mode.value == ("PIECEWISE" if wait == "hooks" else "FULL")
        assert all(step.decision.mode.value == "FULL" for step in launched if step is not loading)
        assert late == [0, 1, 2]
        assert hit.request.num_cached_tokens == 64
        assert hit.request.output_token_ids == expected == model.greedy(prompt, 6)
        for other, state in zip(others, states, strict=True):
            assert state.request.output_token_ids == model.greedy(other, 20)
        if wait == "hooks":
            assert counts_of(llm)["PIECEWISE", loading.decision.key.num_tokens, "needs host work"] == 1


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("wait", "mode"), [("events", "FULL_AND_PIECEWISE"), ("hooks", "FULL_AND_PIECEWISE"), ("step", "NONE")]
)
def test_many_requests_over_little_memory(model: TinyModel, wait: str, mode: str, max_in_flight: int) -> None:
    """Shared beginnings, preemption, aborts, a host memory that forgets too: every token is as without any of it."""
    chance = random.Random(f"{wait} {max_in_flight}")
    heads = prompts_of((48, 32, 64, 80, 48, 64), 160, seed=83)
    tails = prompts_of([chance.randint(1, 20) for _ in range(40)], 160, seed=84)
    prompts = [[*heads[chance.randrange(6)], *tail] for tail in tails]
    with open_llm(
        model, cudagraph_mode=mode, wait=wait, max_in_flight=max_in_flight, host_bytes=400_000, check=0
    ) as llm:
        assert 8 < stats_of(llm).capacity_blocks < 50
        states = []
        while len(states) < len(prompts) or llm.engine.has_unfinished:
            while len(states) < len(prompts) and llm.engine.scheduler.num_waiting < 2:
                states.append(
                    llm.engine.add_request(f"r{len(states)}", prompts[len(states)], greedy(chance.randint(1, 20)))
                )
                if chance.random() < 0.1:
                    llm.engine.abort(f"r{chance.randrange(len(states))}")
            llm.engine.step()
        llm.engine.scheduler.check_integrity()
        stats = stats_of(llm)
        assert stats.loaded_blocks > 10
        assert stats.saved_blocks > stats.capacity_blocks, "host memory never had to forget"
    for prompt, state in zip(prompts, states, strict=True):
        tokens = state.request.output_token_ids
        assert tokens == model.greedy(prompt, len(tokens))


def test_other_weights_make_what_is_kept_worthless(model: TinyModel, tiny_model: TinyFactory) -> None:
    from ostinato.weights.checkpoint import open_checkpoint

    other = tiny_model("Qwen3", num_hidden_layers=3, seed=1)
    with open_llm(model) as llm:
        for prompt in LONG:
            llm.generate(prompt, greedy(3))
        assert stats_of(llm).held_blocks > 0
        llm.update_weights(open_checkpoint(str(other.path)).tensors())
        assert stats_of(llm).held_blocks == 0
        again = llm.generate(LONG[0], greedy(3))[0]
        assert again.num_cached_tokens == 0
        assert again.outputs[0].token_ids == other.greedy(LONG[0], 3)


def test_what_is_kept_outlasts_sleep_and_reconfiguration(model: TinyModel) -> None:
    with open_llm(model) as llm:
        for prompt in LONG:
            llm.generate(prompt, greedy(3))
        llm.sleep()
        llm.wake_up()
        first = llm.generate(LONG[0], greedy(3))[0]
        assert first.num_cached_tokens == 64
        llm.reconfigure(max_num_seqs=2)
        for prompt in LONG[1:]:
            llm.generate(prompt, greedy(3))
        second = llm.generate(LONG[0], greedy(3))[0]
        assert second.num_cached_tokens == 64
        assert first.outputs[0].token_ids == second.outputs[0].token_ids == model.greedy(LONG[0], 3)


def test_a_step_that_was_not_launched_saved_nothing(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(model) as llm:
        expected = [model.greedy(prompt, 3) for prompt in LONG]
        for prompt in LONG[:2]:
            llm.generate(prompt, greedy(3))
        worker = llm.engine.runner._connector
        assert worker is not None

        def fail(meta: object) -> None:
            raise RuntimeError("put in on purpose")

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="put in on purpose"):
            patch.setattr(worker, "start_load_kv", fail)
            llm.generate(LONG[2], greedy(3))
        for prompt, tokens in zip(LONG, expected, strict=True):
            assert llm.generate(prompt, greedy(3))[0].outputs[0].token_ids == tokens


class HeldLoad:
    """The copies of a step's loads wait until they are let go, and the launch of a step that loads fails."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.failed = threading.Event(), threading.Event()
        self.num_begun = self.num_ended = 0
        worker: Any = llm.engine.runner._connector
        copies, run = worker._copies, llm.engine.runner._run

        def held(chosen: Any, *, load: bool) -> Any:
            made = copies(chosen, load=load)
            return made if made is None or not load else lambda layer, count: self._copy(made, layer, count)

        def fail(decision: Any, plan: Any) -> None:
            if plan.connector_meta is not None and plan.connector_meta.loads:
                self.num_begun += 1
                self.failed.set()
                raise RuntimeError("put in on purpose")
            run(decision, plan)

        monkeypatch.setattr(worker, "_copies", held)
        monkeypatch.setattr(llm.engine.runner, "_run", fail)

    def _copy(self, made: Any, layer: int, count: int) -> None:
        self.go.wait(60)
        made(layer, count)
        self.num_ended += count


def test_blocks_of_a_step_that_was_not_launched_are_kept_until_its_loads_have_ended(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(model) as llm:
        for prompt in LONG:
            llm.generate(prompt, greedy(3))
        scheduler, num_ended = llm.engine.scheduler, list[int]()
        discard = scheduler.discard

        def freeing(*arguments: Any) -> Any:
            num_ended.append(load.num_ended)
            return discard(*arguments)

        with monkeypatch.context() as patch:
            load = HeldLoad(llm, patch)
            patch.setattr(scheduler, "discard", freeing)

            def release() -> None:
                load.failed.wait(60)
                time.sleep(0.2)  # an engine that does not wait is through by then
                load.go.set()

            releasing = threading.Thread(target=release)
            releasing.start()
            with pytest.raises(RuntimeError, match="put in on purpose"):
                llm.generate(LONG[0], greedy(3))
            load.go.set()
            releasing.join()
        assert num_ended == [3], "of three layers"
        assert scheduler.num_steps_in_flight == 0
        for prompt in LONG:
            assert list(llm.generate(prompt, greedy(3))[0].outputs[0].token_ids) == model.greedy(prompt, 3)
        scheduler.check_integrity()


def test_loads_of_such_a_step_that_do_not_end_end_the_engine(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.engine import engine as engine_module

    llm = open_llm(model)
    for prompt in LONG:
        llm.generate(prompt, greedy(3))
    load = HeldLoad(llm, monkeypatch)
    monkeypatch.setattr(engine_module, "DROPPED_LOAD_TIMEOUT_S", 0.0)
    with pytest.raises(RuntimeError, match="put in on purpose"):
        llm.generate(LONG[0], greedy(3))
    says = "the engine has failed: ConnectorError: OffloadingConnector still writes into KV blocks"
    with pytest.raises(EngineDeadError, match=says):
        llm.generate(LONG[1], greedy(3))
    assert llm.engine.scheduler.num_steps_in_flight == 0
    assert (load.num_begun, load.num_ended) == (1, 0)
    load.go.set()
    llm.close()
    assert load.num_ended == 3


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"kv_connector": "Nixl"}, "kv_connector='Nixl': must be one of .*OffloadingConnector"),
        ({"kv_connector": "OffloadingConnector", "rank": 1}, "unknown rank; the fields are kv_connector"),
        ({"kv_connector": "OffloadingConnector", "kv_role": "x"}, "kv_role='x'"),
        ({"kv_connector": "OffloadingConnector", "kv_role": "kv_producer"}, "keeps what it gives, kv_both"),
        (
            {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"wait": "no"}},
            "wait='no': must be step",
        ),
        ({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"bytes": 1}}, "bytes: the options are"),
        ({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 0}}, "at least 1"),
        ("OffloadingConnector", "must be an object"),
    ],
)
def test_what_cannot_be(model: TinyModel, config: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(str(model.path), kv_transfer_config=config)


def test_it_needs_the_prefix_cache(model: TinyModel) -> None:
    with pytest.raises(ConfigError, match="leave enable_prefix_caching on"):
        open_llm(model, enable_prefix_caching=False)
