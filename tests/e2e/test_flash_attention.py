"""FlashAttention for prompts as a choice of the engine: on the CPU its specification stands in for it, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato import LLM, ConfigError
from ostinato.engine import build, control
from ostinato.engine.resolve import resolve_flash
from ostinato.kernels import flash_attention
from ostinato.runner import runner

from .conftest import TinyFactory
from .driving import ALWAYS, MODES, drive, greedy
from .models import TinyModel, prompts_of
from .test_oracle import assert_agrees, assert_checked, open_llm

PROMPTS = prompts_of((5, 17, 33, 1, 16, 48), 160, seed=90)


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Qwen3", num_hidden_layers=3)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Makes the engines that follow use it, or not, for steps of any size."""

    def use(flash: bool) -> None:
        for module in (build, control):
            monkeypatch.setattr(module, "resolve_flash", lambda *_: flash)
        monkeypatch.setattr(runner, "MIN_TOKENS", 1)

    return use


@pytest.mark.parametrize("cut", ["attention", "kv_gather"])
@pytest.mark.parametrize("mode", MODES)
def test_the_oracle_and_our_attention_agree(
    model: TinyModel, mode: str, cut: str, on_the_cpu: Callable[[bool], None]
) -> None:
    """Every logit against transformers, every replay against its eager twin, and every step's logits against those
    without, bit for bit: chunks, mixed steps, padding, tables by state row."""
    seen = {}
    for flash in (False, True):
        on_the_cpu(flash)
        with open_llm(model, mode, cudagraph_cut=cut, check=ALWAYS, max_num_batched_tokens=24) as llm:
            assert llm.stats().attention_backend == ("FLASH_ATTN" if flash else "CPU_ATTN")
            seen[flash] = drive(llm, PROMPTS, greedy(12), arrivals=(0, 0, 0, 2, 5, 5))
            assert_checked(llm, mode)
            pages = llm.engine.runner.buffers.flash_page_table
            assert bool(pages.any()) == flash, "written once a step, where it is used"
    assert_agrees(model, seen[True])
    assert seen[True].tokens == seen[False].tokens
    for ours, theirs in zip(seen[True].steps, seen[False].steps, strict=True):
        assert torch.equal(ours.logits, theirs.logits)


def test_small_keys_are_left_to_our_kernels(
    model: TinyModel, on_the_cpu: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_cpu(True)
    monkeypatch.setattr(runner, "MIN_TOKENS", 1000)
    with open_llm(model, "FULL_AND_PIECEWISE") as llm:
        drive(llm, PROMPTS, greedy(4))
        assert not llm.engine.runner.buffers.flash_page_table.any()


def test_a_format_that_it_cannot_read_takes_it_away(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "missing", lambda device: None)
    monkeypatch.setattr(flash_attention, "_DTYPES", (torch.float32,))
    with open_llm(model, "PIECEWISE", max_num_batched_tokens=256) as llm:
        assert llm.stats().attention_backend == "FLASH_ATTN"
        llm.reconfigure(kv_cache_dtype="fp8")
        assert llm.stats().attention_backend == "CPU_ATTN"
        llm.reconfigure(kv_cache_dtype="auto")
        assert llm.stats().attention_backend == "FLASH_ATTN"


# -- the option --------------------------------------------------------------------------------------------------------


def test_names(model: TinyModel) -> None:
    with pytest.raises(ConfigError, match="attention_backend='FLASHINFER': must be one of auto, FLASH_ATTN, TRITON_"):
        LLM(str(model.path), attention_backend="FLASHINFER")
    with pytest.raises(ConfigError, match="attention_backend='FLASH_ATTN': must be auto or TRITON_ATTN with batch_inv"):
        LLM(str(model.path), attention_backend="FLASH_ATTN", batch_invariant=True)


@pytest.mark.parametrize("backend", ["auto", "TRITON_ATTN"])
def test_without_it_attention_is_ours(model: TinyModel, backend: str) -> None:
    with open_llm(model, "NONE", attention_backend=backend, device="cpu") as llm:
        assert llm.stats().attention_backend == "CPU_ATTN"
        assert llm.engine.runner.buffers.flash_page_table.numel() == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "bfloat16", "max_num_batched_tokens": 512}, "needs a CUDA device of compute capability 9.0"),
        ({}, "computes in bfloat16 and float16, not float32"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, "reads a KV cache of the model's dtype"),
    ],
)
def test_asked_for_where_it_cannot_be(model: TinyModel, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend='FLASH_ATTN': .*{why}.*attention_backend='auto'"):
        open_llm(model, "NONE", attention_backend="FLASH_ATTN", device="cpu", **options)


@pytest.mark.parametrize(
    ("options", "flash"),
    [
        ({}, True),
        ({"attention_backend": "FLASH_ATTN"}, True),
        ({"attention_backend": "TRITON_ATTN"}, False),
        ({"batch_invariant": True}, False),
        ({"block_size": 128}, False),
        ({"max_num_seqs": 1024}, False),
    ],
)
def test_choice(options: dict[str, Any], flash: bool, monkeypatch: pytest.MonkeyPatch, model: TinyModel) -> None:
    """Where there is a device for it."""
    from ostinato.config import EngineConfig
    from ostinato.kernels.kv_formats import kv_format
    from ostinato.models.config import parse_config
    from ostinato.weights.checkpoint import open_checkpoint

    monkeypatch.setattr(flash_attention, "missing", lambda device: None)
    config = EngineConfig(model=str(model.path), **options)
    shape = parse_config(open_checkpoint(config.model, "auto").config)
    dtype = torch.bfloat16
    if flash:
        assert shape.head_dim % 8 == 0
    assert resolve_flash(config, shape, kv_format("auto", dtype), dtype, torch.device("cuda")) is flash
