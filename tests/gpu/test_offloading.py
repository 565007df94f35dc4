"""KV that moves, on CUDA: copies on a stream of their own, and what waits for them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ostinato import LLM
from ostinato.connectors.protocol import Wait
from ostinato.kernels import ops, reference_blocks

from ..e2e.driving import counts_of, greedy, launches
from ..e2e.models import TinyModel, prompts_of
from .conftest import ModelFactory

WAITS = [wait.value for wait in Wait]
LONG = prompts_of((70, 90, 80, 75), 512, seed=80)
LATE_CYCLES = 90_000_000
"""Of the device's clock: some 50 ms."""
LONGEST_S = 30.0
"""A gate opens by itself then, so that what it holds up fails and does not hang."""


class Gate:
    """Streams wait here until it is opened, however long other work of the device takes."""

    def __init__(self) -> None:
        self._flag = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._timer: threading.Timer | None = None

    def hold_current_stream(self) -> None:
        from cuda.bindings import driver

        if self._timer is None:  # from now on: an engine's start may take longer than the whole wait may
            self._timer = threading.Timer(LONGEST_S, self.open)
            self._timer.start()

        at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        stream = torch.cuda.current_stream().cuda_stream
        (error,) = driver.cuStreamWaitValue32(stream, self._flag.data_ptr(), 1, int(at_least))
        assert error == driver.CUresult.CUDA_SUCCESS, error

    def open(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._flag.fill_(1)


def open_llm(
    model: TinyModel, device: torch.device, wait: str, mode: str = "FULL_AND_PIECEWISE", load: str = "sync"
) -> LLM:
    return LLM(
        str(model.path),
        device=str(device),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=14,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=[1, 2, 4, 16, 64],
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 26, "wait": wait, "load": load},
        },
    )


@pytest.mark.parametrize("num_bytes", [8, 136, 2 * 16 * 8 * 128 * 2])
@pytest.mark.parametrize("pinned", ["source", "target"])
def test_copies_to_and_from_pinned_memory(device: torch.device, pinned: str, num_bytes: int) -> None:
    generator = torch.Generator().manual_seed(num_bytes)
    source, target = (
        torch.randint(0, 256, (count, 5, num_bytes), dtype=torch.uint8, generator=generator) for count in (40, 60)
    )
    froms, tos = torch.randperm(40, generator=generator)[:33].int(), torch.randperm(60, generator=generator)[:33].int()
    expected = target.clone()
    reference_blocks.copy_blocks(source, expected, froms, tos, 1, 3)
    here = source.pin_memory() if pinned == "source" else source.to(device)
    there = target.pin_memory() if pinned == "target" else target.to(device)
    ops.copy_blocks(here, there, froms.to(device), tos.to(device), 1, 3)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), expected)


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_what_the_pool_forgets_comes_back(
    small_model: ModelFactory, device: torch.device, mode: str, wait: str
) -> None:
    model = small_model(num_hidden_layers=3)
    with open_llm(model, device, wait, mode) as llm:
        first = [llm.generate(prompt, greedy(8))[0] for prompt in LONG]
        second = [llm.generate(prompt, greedy(8))[0] for prompt in LONG]
        stats = llm.stats().connector
        assert stats is not None
        assert stats.loaded_blocks >= 4 + 5 + 4
        for prompt, one, two in zip(LONG, first, second, strict=True):
            assert one.outputs[0].token_ids == two.outputs[0].token_ids == model.greedy(prompt, 8)
            assert two.num_cached_tokens == (len(prompt) - 1) // 16 * 16
        llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize("wait", WAITS)
def test_a_slow_loader_is_waited_for(
    small_model: ModelFactory, device: torch.device, wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's copy begins 50 ms late, on a prompt that hits entirely, beside others that decode."""
    model = small_model(num_hidden_layers=3)
    prompt, others = prompts_of((65,), 512, seed=81)[0], prompts_of((5, 9), 512, seed=82)
    original, late = ops.copy_blocks, []

    def copy_blocks(source: Any, target: Any, source_ids: Any, target_ids: Any, first: int, num_layers: int) -> None:
        if num_layers == 1:
            torch.cuda._sleep(LATE_CYCLES)
            late.append(first)
        original(source, target, source_ids, target_ids, first, num_layers)

    with open_llm(model, device, wait) as llm:
        expected = llm.generate(prompt, greedy(6))[0].outputs[0].token_ids
        for other in LONG:
            llm.generate(other, greedy(3))
        states = [llm.engine.add_request(f"o{i}", other, greedy(20)) for i, other in enumerate(others)]
        while min(state.num_tokens for state in states) < 4:
            llm.engine.step()
        monkeypatch.setattr(ops, "copy_blocks", copy_blocks)
        with launches(llm) as launched:
            hit = llm.engine.add_request("hit", prompt, greedy(6))
            while llm.engine.has_unfinished:
                llm.engine.step()
        (loading,) = [step for step in launched if step.plan.connector_meta and step.plan.connector_meta.loads]  # type: ignore[attr-defined]
        assert late == [0, 1, 2]
        assert loading.decision.mode.value == ("PIECEWISE" if wait == "hooks" else "FULL")
        assert all(step.decision.mode.value == "FULL" for step in launched if step is not loading)
        assert hit.request.num_cached_tokens == 64
        assert hit.request.output_token_ids == expected == model.greedy(prompt, 6)
        for other, state in zip(others, states, strict=True):
            assert state.request.output_token_ids == model.greedy(other, 20)
        if wait == "hooks":
            assert counts_of(llm)["PIECEWISE", loading.decision.key.num_tokens, "needs host work"] == 1


def test_one_kernel_copies_blocks_and_is_there_from_the_start(small_model: ModelFactory, device: torch.device) -> None:
    from ostinato.kernels.triton_blocks import copy_blocks_kernel

    def num_kernels() -> int:
        return sum(len(caches[0]) for caches in copy_blocks_kernel.device_caches.values())

    before = num_kernels()
    with open_llm(small_model(num_hidden_layers=5), device, "step") as llm:
        assert num_kernels() == before + 1
        for prompt in [*LONG, *LONG]:
            llm.generate(prompt, greedy(3))
        stats = llm.stats().connector
        assert stats is not None and stats.saved_blocks > 0 and stats.loaded_blocks > 0
        assert num_kernels() == before + 1


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("late", ["loads", "saves"])
def test_a_slow_asynchronous_load_holds_nobody_up(
    small_model: ModelFactory, device: torch.device, wait: str, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies into the pool wait until 20 steps have run beside them; or those out of it, which must be over before a
    load overwrites a block, begin 50 ms late. The blocks that the load takes held another prompt, which is as it was
    when it comes back."""
    model = small_model(num_hidden_layers=3)
    others = prompts_of((5, 9), 512, seed=82)
    original, num_late, gate = ops.copy_blocks, 0, Gate()

    with open_llm(model, device, wait, load="async") as llm:
        expected = [model.greedy(prompt, 6) for prompt in LONG]
        for prompt in LONG:
            llm.generate(prompt, greedy(3))
        pool = llm.engine.runner.storage.pool.data_ptr()

        def copy_blocks(source: Any, target: Any, *arguments: Any) -> None:
            nonlocal num_late
            into_pool = target.data_ptr() == pool
            if into_pool and late == "loads":
                gate.hold_current_stream()
            if not into_pool and late == "saves":
                torch.cuda._sleep(LATE_CYCLES)
            num_late += into_pool == (late == "loads")
            original(source, target, *arguments)

        monkeypatch.setattr(ops, "copy_blocks", copy_blocks)
        states = [llm.engine.add_request(f"o{i}", other, greedy(40)) for i, other in enumerate(others)]
        while min(state.num_tokens for state in states) < 4:
            llm.engine.step()
        with launches(llm) as launched:
            hit = llm.engine.add_request("hit", LONG[0], greedy(6))
            while not hit.num_tokens:
                llm.engine.step()
                if len(launched) > 22:  # two of them may be the hit's own, once it is in
                    gate.open()
        gate.open()
        assert num_late > 0
        beside = [step for step in launched if step.plan.num_rows == 2]
        assert len(beside) > (20 if late == "loads" else 0)
        assert all(step.decision.mode.value == "FULL" for step in beside)
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert hit.request.num_cached_tokens == 64
        assert hit.request.output_token_ids == expected[0]
        for other, state in zip(others, states, strict=True):
            assert state.request.output_token_ids == model.greedy(other, 40)
        for prompt, tokens in zip(LONG, expected, strict=True):
            assert llm.generate(prompt, greedy(6))[0].outputs[0].token_ids == tokens
        stats = llm.stats().connector
        assert stats is not None and stats.async_loads > 1 and stats.failed_loads == 0
        llm.engine.settle()
        llm.engine.scheduler.check_integrity()
