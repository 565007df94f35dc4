"""The KV cache in FP8, on the tape backend: every mode against its eager twin, scales, capacity, another format at run
time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato import LLM
from ostinato.errors import CaptureError, ConfigError, StaleGraphError, WeightError
from ostinato.graphs.tape import TapeBackend

from .conftest import TinyFactory
from .connecting import disk, stats_of, until
from .driving import ALWAYS, MODES, counts_of, drive, greedy
from .models import TinyModel, build_tiny, prompts_of

PROMPTS = prompts_of((5, 18, 9, 33, 2, 40), 160, seed=3)
CALIBRATES = ("NONE", None, "sets the scales of the KV cache")


@pytest.fixture(scope="module")
def model(tiny_model: TinyFactory) -> TinyModel:
    return tiny_model("Qwen3")


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with scales: 0.5 for keys, 2.0 for values."""
    folder = build_tiny(tmp_path_factory.mktemp("scaled"), "Llama").path
    add_scales(folder, {"k": torch.tensor(0.5), "v": torch.tensor([2.0])})
    return folder


def add_scales(folder: Path, scales: dict[str, torch.Tensor], layers: tuple[int, ...] = (0, 1)) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors |= {
        f"model.layers.{layer}.self_attn.{kind}_scale": scale.clone()
        for layer in layers
        for kind, scale in scales.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def open_llm(path: Path, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "num_gpu_blocks_override": 64,
        "check": ALWAYS,
        "kv_cache_dtype": "fp8",
        **options,
    }
    return LLM(str(path), **settings)


def scales_of(llm: LLM) -> torch.Tensor:
    scales = llm.engine.runner.storage.scales
    assert scales is not None
    return scales.values


def tokens(llm: LLM, count: int = 12) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, greedy(count))]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_agrees_with_its_twin_and_calibrates_once(model: TinyModel, mode: str) -> None:
    with open_llm(model.path, cudagraph_mode="NONE") as llm:
        expected, scales = tokens(llm), scales_of(llm).clone()
    with open_llm(model.path, cudagraph_mode=mode) as llm:
        before = scales_of(llm)
        assert before.eq(1).all()
        assert tokens(llm) == expected
        assert counts_of(llm)[CALIBRATES] == 1
        assert torch.equal(scales_of(llm), scales) and scales_of(llm).data_ptr() == before.data_ptr()
        assert (llm.stats().num_checked > 0) == (mode != "NONE")
        assert llm.stats().kv_cache_dtype == "fp8_e4m3"
        tokens(llm)
        assert counts_of(llm)[CALIBRATES] == 1 and torch.equal(scales_of(llm), scales)


def test_calibration_takes_the_largest_of_each_head_with_room_for_twice_as_much(model: TinyModel) -> None:
    """Only of live tokens: the workspace is NaN in what the step does not have."""
    prompt = PROMPTS[1]
    with open_llm(model.path, kv_cache_dtype="auto", cudagraph_mode="NONE") as llm:
        llm.generate([prompt], greedy(1))
        table = llm.engine.runner.state["block_table"][0, :2].long()
        cells = llm.engine.runner.storage.pool[table].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, : len(prompt)]
        peak = cells.abs().amax(dim=(2, 4))  # [L, 2, G]
    with open_llm(model.path) as llm:
        llm.generate([prompt], greedy(1))
        torch.testing.assert_close(scales_of(llm)[0], 2 * peak[0] / 448)
        torch.testing.assert_close(scales_of(llm), 2 * peak / 448, rtol=0.1, atol=0)  # layer 1 sees FP8 attention


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_logits_stay_near_those_of_the_model_dtype(tmp_path: Path, mode: str, batch_invariant: bool) -> None:
    """Values of E4M3 are off by 2^-4 at most, about 2^-5.5 on average, and errors of many keys cancel."""
    path = build_tiny(tmp_path, "Llama", std=0.1).path
    seen = {}
    for kind in ("auto", "fp8"):
        with open_llm(path, kv_cache_dtype=kind, cudagraph_mode=mode, batch_invariant=batch_invariant) as llm:
            seen[kind] = drive(llm, PROMPTS, greedy(1))
    logits = {
        kind: {output.request.request_id: row for output, _, row in found.logits_by_request()}
        for kind, found in seen.items()
    }
    errors = [float((logits["fp8"][name] - wanted).norm() / wanted.norm()) for name, wanted in logits["auto"].items()]
    assert 1e-4 < max(errors) < 0.08, errors


@pytest.mark.parametrize("level", [1, 2])
def test_scales_of_the_checkpoint_survive_recording_and_sleep(scaled: Path, level: int) -> None:
    with open_llm(scaled) as llm:

        def assert_scales() -> None:
            scales = scales_of(llm)
            assert scales.shape == (2, 2, 2) and scales[:, 0].eq(0.5).all() and scales[:, 1].eq(2.0).all()

        assert_scales()
        expected = tokens(llm)
        assert CALIBRATES not in counts_of(llm)
        address = scales_of(llm).data_ptr()
        llm.sleep(level)
        assert_scales()
        llm.wake_up()
        assert_scales()
        assert tokens(llm) == expected
        llm.reload_weights()
        llm.reconfigure(cudagraph_mode="FULL")
        assert_scales()
        assert scales_of(llm).data_ptr() == address
        assert tokens(llm) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_calibrated_scales_survive_sleep(model: TinyModel, level: int) -> None:
    with open_llm(model.path) as llm:
        expected, scales = tokens(llm), scales_of(llm).clone()
        llm.sleep(level)
        llm.wake_up()
        assert tokens(llm) == expected
        assert torch.equal(scales_of(llm), scales) and counts_of(llm)[CALIBRATES] == 1


def test_scales_are_written_like_weights(scaled: Path) -> None:
    with open_llm(scaled) as llm:
        names = [f"model.layers.{layer}.self_attn.attn.{kind}_scale" for layer in (0, 1) for kind in "kv"]
        assert llm.update_weights([(name, torch.tensor([0.25, 0.75])) for name in names]) == 4
        assert scales_of(llm)[..., 0].eq(0.25).all() and scales_of(llm)[..., 1].eq(0.75).all()
        with pytest.raises(WeightError, match="none for: layer 0 of the values"):
            llm.update_weights([(name, torch.ones(1)) for name in names[:1]])
        with pytest.raises(WeightError, match="one number, or one for each of the 2 kv heads"):
            llm.update_weights([(name, torch.ones(3)) for name in names])
        with pytest.raises(WeightError, match="finite and above 0"):
            llm.update_weights([(name, torch.zeros(1)) for name in names])
        assert scales_of(llm)[..., 0].eq(0.25).all()
        tokens(llm)


def test_a_checkpoint_with_scales_for_some_layers_is_refused(tmp_path: Path) -> None:
    build_tiny(tmp_path)
    add_scales(tmp_path, {"k": torch.tensor(1.0), "v": torch.tensor(1.0)}, layers=(0,))
    with pytest.raises(WeightError, match="none for: layer 1 of the keys, layer 1 of the values"):
        open_llm(tmp_path)
    with open_llm(tmp_path, kv_cache_dtype="auto") as llm:  # which has no use for them
        tokens(llm)


def test_without_calibration_scales_are_one(model: TinyModel) -> None:
    with open_llm(model.path, calculate_kv_scales=False) as llm:
        tokens(llm)
        assert scales_of(llm).eq(1).all() and CALIBRATES not in counts_of(llm)


def test_moved_scales_are_reported_by_name(model: TinyModel) -> None:
    with open_llm(model.path) as llm:
        tokens(llm)
        scales = llm.engine.runner.storage.scales
        assert scales is not None
        scales.values = scales.values.clone()
        with pytest.raises(StaleGraphError, match=r"kv\.scales"):
            llm.engine.runner.verify_statics()


def test_a_block_takes_half_of_a_16_bit_one(model: TinyModel) -> None:
    sizes = {}
    for kind in ("auto", "fp8"):
        with open_llm(model.path, kv_cache_dtype=kind, dtype="bfloat16", check=0) as llm:
            sizes[kind] = llm.engine.runner.storage.block_bytes
    assert sizes["auto"] == 2 * sizes["fp8"] == 2 * 2 * 2 * 16 * 2 * 16


def test_prefix_hits_and_preemption(model: TinyModel) -> None:
    with open_llm(model.path) as llm:
        expected = tokens(llm, 20)
        assert tokens(llm, 20) == expected
        assert llm.stats().prefix_hit_tokens > 0
    with open_llm(model.path, num_gpu_blocks_override=11) as llm:
        scales = None
        assert len(tokens(llm, 20)) == len(expected)
        scales = scales_of(llm).clone()
        assert llm.stats().preemptions > 0
        tokens(llm, 20)
        assert torch.equal(scales, scales_of(llm))
        llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_the_format_changes_under_running_requests(model: TinyModel, max_in_flight: int) -> None:
    """bf16 -> FP8 -> bf16: what is computed again in the model's own type is what it would have been."""
    with open_llm(model.path, kv_cache_dtype="auto", max_in_flight=max_in_flight) as llm:
        expected = tokens(llm, 20)
        states = [llm.engine.add_request(f"r{i}", prompt, greedy(20)) for i, prompt in enumerate(PROMPTS)]
        for _ in range(2):
            llm.engine.step()
        done = llm.reconfigure(kv_cache_dtype="fp8")
        assert done.preempted > 0 and done.kept == 0
        assert llm.stats().kv_cache_dtype == "fp8_e4m3" and llm.stats().num_blocks == 64
        assert llm.reconfigure(kv_cache_dtype="fp8_e4m3").recorded == (), "it is the same format"
        for _ in range(2):  # the first may only hand out what was collected before the change
            llm.engine.step()
        llm.reconfigure(kv_cache_dtype="auto", max_num_seqs=6)
        assert llm.stats().kv_cache_dtype == "float32"
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert all(len(state.request.output_token_ids) == 20 for state in states)
        llm.engine.scheduler.check_integrity()
        assert tokens(llm, 20) == expected
        llm.reconfigure(kv_cache_dtype="fp8")
        tokens(llm)
        assert counts_of(llm)[CALIBRATES] == 2


def test_a_change_of_format_that_fails_leaves_everything(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(model.path, kv_cache_dtype="auto") as llm:
        expected = tokens(llm)
        states = [llm.engine.add_request(f"r{i}", prompt, greedy(12)) for i, prompt in enumerate(PROMPTS)]
        llm.engine.step()

        def refuse(*args: Any) -> None:
            raise CaptureError("put in on purpose")

        monkeypatch.setattr(TapeBackend, "begin", refuse)
        with pytest.raises(CaptureError, match="put in on purpose"):
            llm.reconfigure(kv_cache_dtype="fp8")
        monkeypatch.undo()
        assert llm.stats().kv_cache_dtype == "float32"
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert [state.request.output_token_ids for state in states] == expected
        with pytest.raises(ConfigError, match="kv_cache_dtype='int3': must be one of auto, fp8, fp8_e4m3"):
            llm.reconfigure(kv_cache_dtype="int3")


def test_connectors(model: TinyModel) -> None:
    transfer = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}
    with open_llm(model.path, kv_transfer_config=transfer, num_gpu_blocks_override=12) as llm:
        expected = tokens(llm)
        assert tokens(llm) == expected
        with pytest.raises(ConfigError, match="cannot be changed under a connector"):
            llm.reconfigure(kv_cache_dtype="auto")


def test_blocks_on_disk_never_load_in_another_format(model: TinyModel, tmp_path: Path) -> None:
    """Engines of both formats fill one folder, and each finds its own blocks alone."""
    prompts = prompts_of((70, 90), 160, seed=4)
    options: dict[str, Any] = {"calculate_kv_scales": False, "num_gpu_blocks_override": 16}

    def answers(kind: str, role: str = "kv_both", **more: Any) -> tuple[list[list[int]], int]:
        transfer = disk(tmp_path, role)
        with open_llm(model.path, kv_cache_dtype=kind, kv_transfer_config=transfer, **{**options, **more}) as llm:
            found = [list(llm.generate(prompt, greedy(8))[0].outputs[0].token_ids) for prompt in prompts]
            until(lambda: stats_of(llm).pending_saves == 0)
            assert stats_of(llm).failed_loads == stats_of(llm).failed_saves == 0
            return found, stats_of(llm).hit_tokens

    exact = [model.greedy(prompt, 8) for prompt in prompts]
    rounded, hits = answers("fp8")
    assert hits == 0
    assert len(files_in(tmp_path)) == 4 + 6, "the answers fill a block of the second prompt"
    assert answers("auto") == (exact, 0)
    assert len(files_in(tmp_path)) == 2 * (4 + 6)
    assert answers("auto", "kv_consumer") == (exact, 64 + 80)
    assert answers("fp8_e4m3", "kv_consumer") == (rounded, 64 + 80)
    with pytest.raises(ConfigError, match="calculate_kv_scales=False"):
        answers("fp8", calculate_kv_scales=True)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))
