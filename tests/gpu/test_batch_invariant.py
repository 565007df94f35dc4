"""`batch_invariant=True` on CUDA: the same bits in every batch, mode and dtype; and the products by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import LLM, RequestOutput, SamplingParams
from ostinato.kernels import ops

from ..e2e.driving import MODES, greedy
from ..e2e.models import prompts_of
from .conftest import ModelFactory
from .op_cases import DTYPES, assert_close, normal

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
PROMPTS = prompts_of((1, 40, 3, 17, 7, 133, 16, 64, 9, 31, 2, 200, 15, 18, 5, 11), 512, seed=72)
PARAMS = [
    SamplingParams(temperature=0.9, top_p=0.9, seed=index, max_tokens=12, ignore_eos=True, logprobs=3)
    if index % 4 == 1
    else greedy(12, logprobs=3, prompt_logprobs=2 if index % 4 == 2 else None)
    for index in range(len(PROMPTS))
]


def run(path: str, device: torch.device, dtype: torch.dtype, **options: Any) -> list[tuple[list[int], str, str]]:
    settings: dict[str, Any] = {
        "device": str(device),
        "dtype": NAMES[dtype],
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 200,
        "batch_invariant": True,
        **options,
    }
    with LLM(path, **settings) as llm:
        return [bits_of(output) for output in llm.generate(PROMPTS, PARAMS)]


def bits_of(output: RequestOutput) -> tuple[list[int], str, str]:
    """Tokens and every log-probability; repr of a float is exact."""
    tables = (
        [row and [(token, entry.logprob, entry.rank) for token, entry in row.items()] for row in rows or ()]
        for rows in (output.outputs[0].logprobs, output.prompt_logprobs)
    )
    own, prompt = (repr(table) for table in tables)
    return output.outputs[0].token_ids, own, prompt


@pytest.mark.parametrize("arch", ["Llama", "Qwen3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_in_every_batch(
    small_model: ModelFactory, device: torch.device, dtype: torch.dtype, arch: str
) -> None:
    path = str(small_model(arch).path)
    alone = run(path, device, dtype, max_num_seqs=1, cudagraph_mode="NONE", enable_prefix_caching=False)
    for mode in MODES:
        for max_num_seqs, max_num_batched_tokens in ((1, 512), (3, 37), (8, 100), (16, 512)):
            found = run(
                path,
                device,
                dtype,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                cudagraph_mode=mode,
                check=1,
            )
            assert found == alone, (mode, max_num_seqs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "num_out"), [(2048, 512), (1001, 333), (576, 1000)])
def test_linear(device: torch.device, dtype: torch.dtype, size: int, num_out: int) -> None:
    """Every number of rows up to 140, every place, beside rows that are zero or large."""
    x = normal(140, size, seed=1, dtype=dtype)
    weight, bias = normal(num_out, size, seed=2, dtype=dtype) / size**0.5, normal(num_out, seed=3, dtype=dtype)
    x_there, weight_there, bias_there = (tensor.to(device) for tensor in (x, weight, bias))

    def linear(rows: torch.Tensor) -> torch.Tensor:
        out = torch.full((rows.shape[0], num_out), float("nan"), dtype=dtype, device=device)
        ops.invariant_linear(rows, weight_there, bias_there, out)
        return out

    everything = linear(x_there)
    exact = (x.double() @ weight.double().t() + bias.double()).float()
    assert_close(everything, exact, dtype, 2.0, f"{size} -> {num_out}")
    for count in range(1, 141):
        assert torch.equal(linear(x_there[:count]), everything[:count]), count
    for place in range(140):
        for others in (torch.zeros_like(x_there), 100 * x_there):
            others[place] = x_there[0]
            assert torch.equal(linear(others)[place], everything[0]), place
