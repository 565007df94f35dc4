"""Before recording, every key runs once with two layers only: that launches all that a whole step does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.graphs.dispatch import BatchKey
from ostinato.graphs.mode import RuntimeMode
from ostinato.graphs.recorder import no_cut

from .conftest import TinyFactory
from .test_trials import open_llm


class Launches(TorchDispatchMode):
    """Each op with the shapes, types and strides of its tensors, and its other positional arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.seen.add(f"{func} {[_describe(arg) for arg in args]}")
        return func(*args, **(kwargs or {}))


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.stride()}"
    return str(value)


def launches(run: Callable[[], None]) -> Launches:
    with Launches() as found:
        run()
    return found


@pytest.mark.parametrize("key", [BatchKey(3, 3, 1), BatchKey(8, 5, None)], ids=str)
@pytest.mark.parametrize("arch", ["Llama", "Qwen3"])
def test_two_layers_launch_what_all_do(tiny_model: TinyFactory, arch: str, key: BatchKey) -> None:
    with open_llm(tiny_model(arch, num_hidden_layers=5)) as llm:
        runner = llm.engine.runner
        whole = launches(lambda: runner._step(RuntimeMode.NONE, key, no_cut))
        part = launches(lambda: runner._step(RuntimeMode.NONE, key, no_cut, num_layers=2))
        runner.reset_step_count()
    assert part.seen == whole.seen and part.count < whole.count
