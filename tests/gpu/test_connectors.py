"""Connectors on CUDA: blocks leave the pool and come back over pinned memory, files and another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import LLM
from ostinato.connectors.protocol import Wait

from ..e2e.connecting import FORKS, disk, free_port, stats_of, tcp, until
from ..e2e.driving import greedy
from ..e2e.models import prompts_of
from .conftest import ModelFactory

PROMPTS = prompts_of((70, 90, 130, 75), 512, seed=96)


def open_llm(path: Path, transfer: dict[str, Any] | None, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 24,
        "cudagraph_capture_sizes": [1, 2, 4, 64],
        "kv_transfer_config": transfer,
        **options,
    }
    return LLM(str(path), **settings)


def answers(llm: LLM) -> list[list[int]]:
    return [list(llm.generate(prompt, greedy(6))[0].outputs[0].token_ids) for prompt in PROMPTS]


@pytest.mark.parametrize("wait", [wait.value for wait in Wait])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_files_outlive_the_engine(small_model: ModelFactory, tmp_path: Path, mode: str, wait: str) -> None:
    model = small_model()
    expected = [model.greedy(prompt, 6) for prompt in PROMPTS]
    with open_llm(model.path, disk(tmp_path), cudagraph_mode=mode) as llm:
        assert answers(llm) == expected
        until(lambda: stats_of(llm).pending_saves == 0)
        assert stats_of(llm).failed_saves == 0
    with open_llm(model.path, disk(tmp_path, "kv_consumer", wait=wait), cudagraph_mode=mode) as llm:
        assert answers(llm) == expected
        assert stats_of(llm).hit_tokens == sum((len(prompt) - 1) // 16 * 16 for prompt in PROMPTS)


def produce(pipe: Any, path: Path, port: int) -> None:
    with open_llm(path, tcp(port, "kv_producer"), gpu_memory_utilization=0.4) as llm:
        pipe.send("ready")
        while (prompt := pipe.recv()) is not None:
            pipe.send(list(llm.generate(prompt, greedy(1))[0].outputs[0].token_ids))


def test_two_processes_on_one_gpu(small_model: ModelFactory) -> None:
    """Started anew rather than forked: this process has a CUDA context, which cannot be inherited."""
    assert torch.cuda.is_available()
    model, port = small_model(), free_port()
    expected = [model.greedy(prompt, 6) for prompt in PROMPTS]
    pipe, there = FORKS.Pipe()
    producer = FORKS.Process(target=produce, args=(there, model.path, port), daemon=True)
    producer.start()
    there.close()
    try:
        assert pipe.poll(120) and pipe.recv() == "ready"
        with open_llm(model.path, tcp(port, "kv_consumer"), gpu_memory_utilization=0.4) as llm:
            for prompt, tokens in zip(PROMPTS, expected, strict=True):
                pipe.send(prompt)
                assert pipe.recv() == tokens[:1]
                output = llm.generate(prompt, greedy(6))[0]
                assert list(output.outputs[0].token_ids) == tokens
                assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16
            assert stats_of(llm).failed_loads == 0
        pipe.send(None)
        producer.join(60)
    finally:
        producer.kill()
