"""`cudagraph_cut="kv_gather"` on CUDA: the op, the trials, and the tokens of the other cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ostinato import LLM
from ostinato.kernels import ops

from ..e2e import cards
from ..e2e.driving import ALWAYS, MODES, greedy
from ..e2e.models import TinyModel
from .conftest import ModelFactory
from .op_cases import DTYPES, attention_case
from .test_engine import NEAR_TIE, PROMPTS, assert_near_oracle, assert_same_up_to_near_ties, open_llm
from .test_inspect import inspect
from .test_trials import TIE

GATHER: dict[str, Any] = {"cudagraph_cut": "kv_gather"}
PARAMS = greedy(12, logprobs=5)


# -- the op ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("num_heads", "head_size"), [(1, 64), (3, 80), (8, 128)])
def test_blocks_are_copied_bit_for_bit(
    device: torch.device, dtype: torch.dtype, num_heads: int, head_size: int
) -> None:
    """From a layer's view of a pool with two, in one graph for all lengths; nothing else is written."""
    num_rows, width, num_blocks, generator = 5, 40, 211, torch.Generator().manual_seed(0)
    pool = torch.randn((num_blocks, 2, 2, 16, num_heads, head_size), generator=generator).to(dtype)
    table = (torch.randperm(num_blocks - 1, generator=generator)[: 5 * width] + 1).int().view(5, width)
    table = torch.cat([table, torch.zeros((1, width), dtype=torch.int32)])
    on_device, own_table = pool.to(device), table.to(device)
    row_slot, seq_lens = (torch.zeros(num_rows, dtype=torch.int32, device=device) for _ in range(2))
    target = torch.zeros((num_rows * width, 2, 16, num_heads, head_size), device=device).to(dtype)

    def step() -> None:
        ops.gather_blocks(
            on_device[:, 1, 0], on_device[:, 1, 1], own_table, row_slot, seq_lens, num_rows, target[:, 0], target[:, 1]
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths, slots in (
        ([1, 16, 17, 640, 33], [4, 2, 0, 1, 3]),
        ([0, 639, 0, 1, 0], [5, 0, 5, 3, 5]),
        ([0] * 5, [5] * 5),
    ):
        row_slot.copy_(torch.tensor(slots, dtype=torch.int32))
        seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        target.view(torch.uint8).fill_(7)
        graph.replay()
        expected = torch.full(target.view(torch.uint8).shape, 7, dtype=torch.uint8).view(dtype)
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            for column in range(-(-length // 16)):
                expected[row * width + column] = pool[table[slot, column], 1]
        assert torch.equal(target.cpu().view(torch.uint8), expected.view(torch.uint8)), lengths


@pytest.mark.parametrize("query_len", [0, 1])
def test_attention_over_what_was_gathered_has_the_same_bits(device: torch.device, query_len: int) -> None:
    each = {"query_len": 1} if query_len else {"query_lens": [1, 1, 40, 0]}
    case = attention_case(
        torch.bfloat16, [70, 1, 333, 0], num_heads=8, num_kv_heads=2, head_size=128, width=32, **each
    ).on(device)
    work = torch.full((4 * 32, 2, *case.k_cache.shape[1:]), float("nan"), dtype=torch.bfloat16, device=device)
    table = torch.arange(4 * 32, dtype=torch.int32, device=device).view(4, 32)
    slots = torch.arange(4, dtype=torch.int32, device=device)
    ops.gather_blocks(
        case.k_cache, case.v_cache, case.block_table, case.row_slot, case.seq_lens, 4, work[:, 0], work[:, 1]
    )
    for num_splits in (1, 4) if query_len else (1,):
        out = torch.full_like(case.q, float("nan"))
        ops.attention(
            case.q, work[:, 0], work[:, 1], table, slots, case.query_start, case.seq_lens, case.scale, query_len, 4,
            num_splits, out,
        )  # fmt: skip
        assert torch.equal(out, case.run(num_splits))
        assert not out.isnan().any()


# -- the engine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_mode(small_model: ModelFactory, device: torch.device, dtype: str, mode: str) -> None:
    """The other cut's decode steps go through another attention kernel, hence near-ties."""
    model = small_model("Qwen3")
    with open_llm(model, device, dtype, "NONE") as llm:
        expected = llm.generate(PROMPTS, PARAMS)
    with open_llm(model, device, dtype, mode, check=ALWAYS, **GATHER) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert (llm.stats().num_checked > 0) == (mode != "NONE")
    assert_same_up_to_near_ties(outputs, expected, NEAR_TIE[dtype])
    if dtype == "float32":
        assert_near_oracle(model, outputs, NEAR_TIE[dtype])


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_fp8(small_model: ModelFactory, device: torch.device, mode: str) -> None:
    if torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("the device has no FP8")
    with open_llm(small_model(), device, "bfloat16", mode, check=ALWAYS, kv_cache_dtype="fp8", **GATHER) as llm:
        gathered = llm.engine.runner.buffers.work.gathered
        assert gathered is not None and gathered.pool.dtype is torch.float8_e4m3fn
        llm.generate(PROMPTS, PARAMS)
        assert llm.stats().num_checked > 0


def test_batch_invariant(small_model: ModelFactory, device: torch.device) -> None:
    """The same kernel over the same values: the bits of the other cut."""
    found = []
    for cut in ("attention", "kv_gather"):
        with open_llm(
            small_model(), device, "bfloat16", "FULL_AND_PIECEWISE", batch_invariant=True, cudagraph_cut=cut
        ) as llm:
            outputs = llm.generate(PROMPTS, PARAMS)
        found.append([(output.outputs[0].token_ids, repr(output.outputs[0].logprobs)) for output in outputs])
    assert found[0] == found[1]


@pytest.fixture
def trial_model(small_model: ModelFactory) -> TinyModel:
    return small_model(vocab_size=cards.V, std=0.2)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_trials(trial_model: TinyModel, device: torch.device, mode: str) -> None:
    options = {"device": str(device), "dtype": "float32", **GATHER}
    cards.nan_pool(trial_model, mode, tie=TIE, **options)
    cards.who_wrote_what(trial_model, mode, **options)
    cards.grow_then_shrink(trial_model, mode, tie=TIE, **options)


def test_attention_is_in_the_graphs(small_model: ModelFactory, device: torch.device, tmp_path: Any) -> None:
    nodes = inspect(small_model().path, tmp_path, "--key", "mixed:8", "--cudagraph-cut", "kv_gather")["nodes"]
    assert [node["name"] for node in nodes if node["kind"] == "eager"] == ["kv_gather", "kv_gather", "head"]
    kernels = [node["name"] for node in nodes if node["kind"] == "kernel"]
    assert kernels.count("prefill_kernel") == 2
    assert not {"kv_write_kernel", "gather_blocks_kernel"} & set(kernels)


def test_the_workspace_is_in_the_budget(small_model: ModelFactory, device: torch.device) -> None:
    """What it takes, the KV cache does not get."""
    blocks = {}
    for cut in ("attention", "kv_gather"):
        with open_llm(
            small_model(num_hidden_layers=8),
            device,
            "bfloat16",
            "NONE",
            cudagraph_cut=cut,
            check=0,
            num_gpu_blocks_override=None,
            gpu_memory_utilization=0.2,
            max_model_len=2048,
            max_num_seqs=512,
            max_num_batched_tokens=512,
            cudagraph_capture_sizes=None,
        ) as llm:
            blocks[cut] = _blocks(llm)
    (more, block_bytes, none), (fewer, _, size) = blocks["attention"], blocks["kv_gather"]
    assert (none, size) == (0, 512 * 2048 * 2 * 2 * 64 * 2)
    assert abs((more - fewer) * block_bytes - size) < 64 << 20


def _blocks(llm: LLM) -> tuple[int, int, int]:
    runner = llm.engine.runner
    return llm.stats().num_blocks, runner.storage.block_bytes, runner.buffers.gather_bytes
