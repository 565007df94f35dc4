"""What a step does to the device: no allocation and no synchronisation in steady state, memory within its budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato import LLM, CapacityError, UnavailableError
from ostinato.runner.runner import InFlight
from ostinato.step import StepPlan

from ..e2e.driving import greedy
from ..e2e.models import prompts_of
from .conftest import ModelFactory

GIB = 1 << 30


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_no_allocation_and_no_sync_in_steady_decode(
    small_model: ModelFactory, device: torch.device, num_rows: int, max_in_flight: int
) -> None:
    """200 launches in a row: the allocator is not asked once, and nothing in a launch waits for the device."""
    prompts = prompts_of([5 + index % 7 for index in range(num_rows)], 512, seed=70)
    with LLM(
        str(small_model().path),
        device=str(device),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=64 * 20,
        max_in_flight=max_in_flight,
        cudagraph_capture_sizes=[1, 8, 64, 512],
    ) as llm:
        engine, runner = llm.engine, llm.engine.runner
        states = [engine.add_request(f"r-{i}", prompt, greedy(260)) for i, prompt in enumerate(prompts)]
        while any(state.num_tokens < 8 for state in states):
            engine.step()

        original: Callable[[StepPlan], InFlight] = runner.launch
        waits = 0.0

        def launch(plan: StepPlan) -> InFlight:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return original(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        runner.launch = launch  # type: ignore[method-assign]
        torch.cuda.synchronize()
        before, counted = torch.cuda.memory_stats(device), dict(_counts(llm))
        started = time.perf_counter()
        for _ in range(200):
            engine.step()
        waits = time.perf_counter() - started
        after = torch.cuda.memory_stats(device)
        new = {key: count - counted.get(key, 0) for key, count in _counts(llm).items()}
        runner.launch = original  # type: ignore[method-assign]
    for name in ("allocation.all.allocated", "segment.all.allocated", "num_alloc_retries", "num_device_alloc"):
        assert after.get(name, 0) == before.get(name, 0), f"{name}: a step in steady decode allocates"
    ran = {key: count for key, count in new.items() if count}
    assert set(ran) == {("FULL", num_rows)}, ran
    assert sum(ran.values()) >= 200
    print(f"{num_rows} rows, {max_in_flight} in flight: {waits / 200 * 1e6:.0f} us a step")


def _counts(llm: LLM) -> dict[tuple[str, int], int]:
    counts: dict[tuple[str, int], int] = {}
    for row in llm.stats().steps:
        key = (row.mode, row.key.num_tokens if row.key else 0)
        counts[key] = counts.get(key, 0) + row.count
    return counts


def budget_llm(
    small_model: ModelFactory, device: torch.device, utilization: float, *, dtype: str = "bfloat16", **options: Any
) -> LLM:
    return LLM(
        str(small_model(num_hidden_layers=4).path),
        device=str(device),
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        gpu_memory_utilization=utilization,
        **options,
    )


@pytest.mark.parametrize("utilization", [0.5, 0.9])
@pytest.mark.parametrize("ballast_gib", [0, 10])
def test_budget(small_model: ModelFactory, device: torch.device, utilization: float, ballast_gib: int) -> None:
    """With another tenant on the device: what is in use in the end is the share asked for, hardly more nor less."""
    total = torch.cuda.mem_get_info(device)[1]
    ballast = torch.empty(ballast_gib * GIB, dtype=torch.uint8, device=device)
    with budget_llm(small_model, device, utilization) as llm:
        stats = llm.stats()
        outputs = llm.generate(prompts_of((30, 200, 7), 512, seed=71), greedy(40))
        free = torch.cuda.mem_get_info(device)[0]
    used = total - free
    assert used <= total * utilization, f"{used / GIB:.2f} of {total * utilization / GIB:.2f} GiB"
    assert used > total * utilization - GIB, "memory that was asked for is left unused"
    assert stats.num_blocks > 1000
    assert stats.recording_bytes < GIB
    assert all(len(output.outputs[0].token_ids) == 40 for output in outputs)
    assert ballast.numel() == ballast_gib * GIB


def test_a_budget_that_cannot_work_is_refused_with_the_numbers(small_model: ModelFactory, device: torch.device) -> None:
    """The share is taken already by the ballast; the memory of what was built so far comes back."""
    total = torch.cuda.mem_get_info(device)[1]
    ballast = torch.empty(int(total * 0.2), dtype=torch.uint8, device=device)
    with pytest.raises(CapacityError, match=r"gpu_memory_utilization=0\.1 .*MiB.*blocks"):
        budget_llm(small_model, device, 0.1)
    del ballast
    with budget_llm(small_model, device, 0.1) as llm:
        assert llm.stats().num_blocks > 100


def test_closing_gives_the_memory_back(small_model: ModelFactory, device: torch.device) -> None:
    """Three engines one after the other, half the device each."""
    left = []
    for _ in range(3):
        with budget_llm(small_model, device, 0.5) as llm:
            llm.generate(prompts_of((9, 20, 3), 512), greedy(4))
        del llm
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        left.append(torch.cuda.mem_get_info(device)[0])
    assert left[0] - left[2] < GIB // 4, [value / GIB for value in left]


def test_startup_parts_add_up(small_model: ModelFactory, device: torch.device) -> None:
    for options in ({"cudagraph_mode": "NONE"}, {"cudagraph_capture_sizes": [1, 2, 4, 64, 256]}, {}):
        started = time.perf_counter()
        llm = budget_llm(small_model, device, 0.3, **options)
        wall = time.perf_counter() - started
        with llm:
            parts = llm.stats().startup_s
        assert wall * 0.95 - 0.02 < sum(parts.values()) <= wall, (options, parts)


@pytest.mark.parametrize("utilization", [0.5, 0.9, 0.97])
def test_the_parts_of_the_memory_add_up(small_model: ModelFactory, device: torch.device, utilization: float) -> None:
    """Each was sized or measured on its own, when it was made; together they are what the device says now."""
    with budget_llm(small_model, device, utilization) as llm:
        llm.generate(prompts_of((30, 200, 7), 512, seed=71), greedy(40))
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            memory = llm.stats().memory
            assert memory.unaccounted is not None
            assert abs(memory.unaccounted) < 64 << 20, memory
            llm.reconfigure(max_num_seqs=32)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_the_memory_back(small_model: ModelFactory, device: torch.device, level: int) -> None:
    """In the middle of requests; the graphs recorded before replay over the memory that came back."""
    prompts, params = prompts_of((30, 200, 7), 512, seed=72), greedy(60)
    with budget_llm(small_model, device, 0.5, dtype="float32", check=1_000_000) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        states = [llm.engine.add_request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
        for _ in range(20):
            llm.engine.step()
        awake, recordings = torch.cuda.mem_get_info(device)[0], llm.stats().recordings
        held = llm.stats().memory
        llm.sleep(level)
        assert torch.cuda.mem_get_info(device)[0] - awake > held.kv + held.weights - (64 << 20)
        llm.wake_up(["weights"])
        while llm.engine.can_step:  # hands out what was in flight
            llm.engine.step()
        with pytest.raises(UnavailableError, match="kv_cache"):
            llm.engine.step()
        llm.wake_up()
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert [state.request.output_token_ids for state in states] == expected
        assert llm.stats().recordings == recordings


def test_reconfigure_while_requests_run(small_model: ModelFactory, device: torch.device) -> None:
    """Recordings that stay are right after others were dropped, and the pool ends up filling its budget again."""
    prompts, params = prompts_of((30, 200, 7, 90), 512, seed=73), greedy(60)
    with budget_llm(small_model, device, 0.5, dtype="float32", check=1_000_000) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        states = [llm.engine.add_request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
        for options in (
            {"cudagraph_capture_sizes": [1, 4, 64, 256]},
            {"cudagraph_mode": "FULL"},
            {"max_num_seqs": 8},
            {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": None, "max_num_seqs": 64},
        ):
            for _ in range(8):
                llm.engine.step()
            llm.reconfigure(**options)
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert [state.request.output_token_ids for state in states] == expected
        free, total = torch.cuda.mem_get_info(device)
        assert total - free <= total * 0.5
        assert llm.stats().num_checked > 20


def test_recording_in_the_background(small_model: ModelFactory, device: torch.device) -> None:
    prompts, params = prompts_of((30, 200, 7), 512, seed=74), greedy(60)
    with budget_llm(small_model, device, 0.5, dtype="float32") as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        everything = llm.stats().num_recordings
    with budget_llm(small_model, device, 0.5, dtype="float32", check=1_000_000, capture="background") as llm:
        first = llm.stats()
        assert 0 < first.num_recordings < everything
        states = [llm.engine.add_request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
        for _ in range(10):
            llm.engine.step()
        llm.engine.settle()
        assert llm.engine.runner.record_next() is not None, "in the middle of requests"
        while llm.engine.has_unfinished:
            llm.engine.step()
        while llm.engine.idle():
            pass
        assert [state.request.output_token_ids for state in states] == expected
        assert llm.stats().num_recordings == everything
        free, total = torch.cuda.mem_get_info(device)
        assert total - free <= total * 0.5, "recordings that came later were not in the budget"
