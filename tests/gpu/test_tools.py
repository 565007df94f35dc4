"""Tool calls on CUDA, through the real server and client: arguments fit their schema whatever the random model says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ostinato import LLM

if TYPE_CHECKING:
    from ..server.running import Running

PACKAGES = ("llguidance", "fastapi", "uvicorn", "httptools", "httpx", "openai")


@pytest.fixture(scope="module")
def server(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """In mode FULL_AND_PIECEWISE, the first replays of each key compared with eager runs."""
    for package in PACKAGES:
        pytest.importorskip(package, reason=f"{package} is not installed")
    from ..server.calling import build
    from ..server.running import SMALL, running

    sizes = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "head_dim": 64}
    model = build(tmp_path_factory.mktemp("tools"), std=0.1, **sizes)
    options: dict[str, Any] = {**SMALL, "max_model_len": 1024, "num_gpu_blocks_override": 200, "check": 2}
    with running(
        lambda: LLM(str(model.path), device=str(device), dtype="float32", **options), tool_call_parser="hermes"
    ) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function(server: Running, stream: bool) -> None:
    from ..server.calling import added_up, ask, check, of_message

    named = {"type": "function", "function": {"name": "add"}}
    answer = ask(server, tool_choice=named, stream=stream)
    content, calls, reason = added_up(answer) if stream else of_message(answer.choices[0])
    assert (content, [name for name, _ in calls], reason) == (None, ["add"], "stop")
    check(*calls[0])


@pytest.mark.parametrize("stream", [False, True])
def test_required(server: Running, stream: bool) -> None:
    from ..server.calling import added_up, ask, check, of_message

    answer = ask(server, tool_choice="required", parallel_tool_calls=False, stream=stream)
    content, calls, reason = added_up(answer) if stream else of_message(answer.choices[0])
    assert (content, len(calls), reason) == (None, 1, "tool_calls")
    check(*calls[0])


def test_every_choice_of_a_batch(server: Running) -> None:
    """Rows with masks of their own in one step, replayed from a recording."""
    from ..server.calling import ask, check, of_message

    answer = ask(server, tool_choice="required", parallel_tool_calls=False, n=4)
    for choice in answer.choices:
        _, [(name, arguments)], reason = of_message(choice)
        assert reason == "tool_calls"
        check(name, arguments)
    stats = server.between_steps(lambda llm: llm.stats())
    assert stats.num_checked > 0
    assert any(step.mode == "FULL" and step.key and step.key.num_rows >= 4 for step in stats.steps)
