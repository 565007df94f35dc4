"""`compile=True`: the same tokens through `torch.compile`, recorded and checked like everything else."""

from __future__ import annotations

import sys

from ostinato import LLM

from .conftest import TinyFactory
from .driving import greedy
from .models import prompts_of


def run(path: str, **options: object) -> tuple[list[list[int]], int]:
    with LLM(path, device="cpu", max_num_seqs=4, max_num_batched_tokens=32, check=1, **options) as llm:
        outputs = llm.generate(prompts_of((3, 1, 20, 7), 160, seed=5), greedy(12))
        return [output.outputs[0].token_ids for output in outputs], llm.stats().num_checked


def test_compiled_layers_give_the_same_tokens(tiny_model: TinyFactory) -> None:
    path = str(tiny_model("Qwen2").path)
    plain, _ = run(path)
    compiled, num_checked = run(path, compile=True)
    assert compiled == plain
    assert num_checked > 0
    assert "ostinato.models.compiled" in sys.modules


def test_enforce_eager_turns_compile_off(tiny_model: TinyFactory) -> None:
    path = str(tiny_model("Llama").path)
    with LLM(path, compile=True, enforce_eager=True) as llm:
        assert not llm.engine.runner.model.compiles
        assert llm.stats().num_recordings == 0
