"""The products of some rows inside the engine, beside cuBLAS and the separate ops: batches of 8, 16 and 64 in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import LLM, RequestOutput, SamplingParams
from ostinato.kernels import ops, small_configs
from ostinato.kernels.small_configs import HEAD_ROWS, small_config
from ostinato.models import decoder, projections

from ..e2e.driving import greedy, modes_of
from ..e2e.models import TinyModel, prompts_of
from .conftest import ModelFactory
from .test_engine import NEAR_TIE, V, assert_near_oracle, assert_same_up_to_near_ties

SIZES = (8, 16, 64)


def generate(
    model: TinyModel, device: torch.device, batch: int, mode: str, params: SamplingParams | None = None
) -> list[RequestOutput]:
    """As many prompts as rows, so that decode steps have all of them; under check where there are graphs."""
    options: dict[str, Any] = {
        "device": str(device),
        "dtype": "bfloat16",
        "max_model_len": 128,
        "max_num_seqs": batch,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 6 * batch + 20,
        "cudagraph_capture_sizes": [batch, 128],
        "cudagraph_mode": mode,
        "check": 2,
    }
    prompts = prompts_of([3 + (7 * n) % 23 for n in range(batch)], V, seed=62)
    with LLM(str(model.path), **options) as llm:
        outputs = llm.generate(prompts, params or greedy(24, logprobs=5))
        if mode != "NONE":
            assert llm.stats().num_checked > 0 and modes_of(llm) != {"NONE"}
    return outputs


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("batch", SIZES)
def test_answers_are_those_of_cublas_up_to_rounding(
    small_model: ModelFactory, device: torch.device, monkeypatch: pytest.MonkeyPatch, batch: int, mode: str
) -> None:
    model = small_model(intermediate_size=1088)
    down = small_config("parts", 192, 1088, batch)
    assert down is not None and down.num_parts == 2 and small_config("gated", 1088, 192, batch) is not None
    called = set()
    for name in ("small_linear", "small_gate_up_silu", "small_linear_parts", "add_parts_rms_norm", "add_parts"):
        monkeypatch.setattr(projections.ops, name, _noting(called, name, getattr(ops, name)))
    outputs = generate(model, device, batch, mode)
    assert called == {"small_linear", "small_gate_up_silu", "small_linear_parts", "add_parts_rms_norm", "add_parts"}
    assert_near_oracle(model, outputs, NEAR_TIE["bfloat16"])

    called.clear()
    monkeypatch.setattr(decoder, "MAX_SMALL_ROWS", 0)
    plain = generate(model, device, batch, mode)
    assert not called
    assert_near_oracle(model, plain, NEAR_TIE["bfloat16"])
    assert_same_up_to_near_ties(plain, outputs, NEAR_TIE["bfloat16"])


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("batch", SIZES)
def test_heads_that_choose_tokens(
    small_model: ModelFactory, device: torch.device, monkeypatch: pytest.MonkeyPatch, batch: int, mode: str
) -> None:
    """Under check, with a tiling for every number of rows: the answers of logits and sampler, up to near ties where
    these come from another product. Rows that ask for no log-probabilities, whose logits are not written, have the
    tokens of rows that do, greedy and drawn."""
    model = small_model()
    fields = (16, 64, 64, 1, 4, 3, True, 128)
    plain = generate(model, device, batch, mode)
    for rows in HEAD_ROWS:
        monkeypatch.setitem(small_configs.HEADS, (V, 192, rows), fields)
    called: set[str] = set()
    monkeypatch.setattr(decoder.ops, "small_linear_sample", _noting(called, "head", ops.small_linear_sample))
    outputs = generate(model, device, batch, mode)
    assert called == {"head"}
    drawn = {"temperature": 1.0, "seed": 5, "max_tokens": 24, "ignore_eos": True}
    for asked in (drawn, {**drawn, "temperature": 0.0}):
        with_logprobs, without = (
            generate(model, device, batch, mode, SamplingParams(**asked, logprobs=n)) for n in (5, None)
        )
        assert [o.outputs[0].token_ids for o in with_logprobs] == [o.outputs[0].token_ids for o in without]
    assert_near_oracle(model, outputs, NEAR_TIE["bfloat16"])
    assert_same_up_to_near_ties(plain, outputs, NEAR_TIE["bfloat16"])


def _noting(called: set[str], name: str, function: Any) -> Any:
    def call(*args: Any) -> Any:
        called.add(name)
        return function(*args)

    return call


def test_nothing_compiles_after_the_start(
    small_model: ModelFactory, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PIECEWISE runs its head between graphs with the rows at hand: the kernels for any number are loaded at start."""
    from ostinato.kernels import triton_few_dot, triton_few_fma, triton_small, triton_small_gemm

    kernels = [
        triton_small_gemm.small_gemm_kernel,
        triton_small.add_parts_kernel,
        triton_few_dot.dot_kernel,
        triton_few_fma.norm_linear_kernel,
        triton_few_fma.linear_residual_kernel,
    ]

    def loaded() -> int:
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    with LLM(
        str(small_model().path),
        device=str(device),
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=40,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=200,
        cudagraph_capture_sizes=[64],
        cudagraph_mode="PIECEWISE",
    ) as llm:
        before = loaded()
        assert before > 0
        for batch in (1, 2, 3, 5, 9, 17, 33, 40):
            llm.generate(prompts_of([5] * batch, V, seed=batch), greedy(3))
        assert loaded() == before
