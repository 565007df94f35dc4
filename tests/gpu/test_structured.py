"""Outputs with a structure, on CUDA: the mask of a step is data that every graph reads."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from ostinato import LLM, SamplingParams, StructuredOutputsParams

from ..e2e.driving import MODES
from .conftest import ModelFactory

pytest.importorskip("llguidance", reason="llguidance is not installed")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},  # or a random model may go on with spaces
}


def params(seed: int, **structure: Any) -> SamplingParams:
    structured = StructuredOutputsParams(**structure)
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=80, structured_outputs=structured)


@pytest.mark.parametrize("mode", MODES)
def test_beside_free_rows_in_every_mode(small_model: ModelFactory, device: torch.device, mode: str) -> None:
    """A random model says what it is told to, in rows that others had before; free rows say what they do alone."""
    model = small_model("Llama", vocab_size=256, tokenizer=True)
    free = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    asked = [params(1, json=SCHEMA), params(2, regex="[ab]{3}[0-9]{1,9}x"), params(3, choice=("yes", "no", "maybe so"))]
    with LLM(
        str(model.path), device=str(device), dtype="float32", max_model_len=128, max_num_seqs=4,
        max_num_batched_tokens=48, num_gpu_blocks_override=60, cudagraph_mode=mode, check=2,
    ) as llm:  # fmt: skip
        alone = llm.generate(["Say it: "] * 4, free)
        rounds = [llm.generate(["Say it: "] * 4, [*asked, free]) for _ in range(2)]
        again = llm.generate(["Say it: "] * 4, free)
    answers = [[output.outputs[0] for output in outputs] for outputs in rounds]
    for record, number, choice, other in answers:
        assert [answer.finish_reason for answer in (record, number, choice)] == ["stop"] * 3
        said = json.loads(record.text)
        assert set(said) == {"name", "age"} and len(said["name"]) <= 5 and 0 <= said["age"] <= 99
        assert re.fullmatch("[ab]{3}[0-9]{1,9}x", number.text)
        assert choice.text in ("yes", "no", "maybe so")
        assert other.token_ids == alone[3].outputs[0].token_ids
    assert [output.outputs[0].token_ids for output in again] == [output.outputs[0].token_ids for output in alone]
