"""GGUF checkpoints: names, row order, dequantisation, configuration."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from tiny_gguf import HEAD_DIM, HEADS, KV_HEADS, tiny_tensors

from ostinato.errors import ConfigError, WeightError
from ostinato.weights.gguf import GgufCheckpoint
from ostinato.weights.names import hf_name

Q = gguf.GGMLQuantizationType


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row order of GGML's rope: the two halves of a head take turns. Written out, to be no inverse of the code."""
    half = len(rows) // num_heads // 2
    order = [
        head * 2 * half + part * half + pair for head in range(num_heads) for pair in range(half) for part in (0, 1)
    ]
    return rows[order]


def as_llama(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name: interleaved(data, HEADS if "attn_q." in name else KV_HEADS)
        if name.startswith(("blk.0.attn_q.", "blk.0.attn_k."))
        else data
        for name, data in tensors.items()
    }


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_names_values_and_row_order(write_gguf, arch: str) -> None:
    tensors = tiny_tensors()
    rng = np.random.default_rng(1)
    if arch != "qwen3":
        tensors["blk.0.attn_q.bias"] = rng.standard_normal(HEADS * HEAD_DIM, dtype=np.float32)
        tensors["blk.0.attn_k.bias"] = rng.standard_normal(KV_HEADS * HEAD_DIM, dtype=np.float32)
    else:
        tensors["blk.0.attn_q_norm.weight"] = rng.standard_normal(HEAD_DIM, dtype=np.float32)
        tensors["blk.0.attn_k_norm.weight"] = rng.standard_normal(HEAD_DIM, dtype=np.float32)
    checkpoint = GgufCheckpoint(write_gguf(as_llama(tensors) if arch == "llama" else tensors, arch))
    loaded = dict(checkpoint.tensors())
    infos = checkpoint.tensor_infos()
    assert loaded.keys() == infos.keys() == {hf_name(name) for name in tensors}
    assert "model.layers.0.self_attn.q_proj.weight" in loaded and "model.layers.0.mlp.down_proj.weight" in loaded
    for name, data in tensors.items():
        tensor = loaded[str(hf_name(name))]
        assert infos[str(hf_name(name))] == (tuple(tensor.shape), tensor.dtype)
        np.testing.assert_array_equal(tensor.numpy(), data)
    assert checkpoint.total_bytes == sum(data.nbytes for data in tensors.values())


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0])
def test_quantised_tensors_come_back_close(write_gguf, kind: Q) -> None:
    original = np.random.default_rng(2).standard_normal((5, 96), dtype=np.float32)
    tensors = tiny_tensors() | {"token_embd.weight": (quantize(original, kind), kind)}
    checkpoint = GgufCheckpoint(write_gguf(tensors, "qwen2"))
    loaded = dict(checkpoint.tensors())["model.embed_tokens.weight"]
    assert loaded.dtype is torch.float32 and loaded.shape == (5, 96)
    bits = {Q.Q4_0: 4, Q.Q4_1: 4, Q.Q5_0: 5, Q.Q5_1: 5, Q.Q8_0: 8}[kind]
    assert (loaded - torch.from_numpy(original)).abs().max() <= 2 * np.abs(original).max() / 2 ** (bits - 1)


@pytest.mark.parametrize("kind", [Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q4_1, Q.Q8_0])
def test_chunked_dequantisation_is_the_packages(write_gguf, monkeypatch: pytest.MonkeyPatch, kind: Q) -> None:
    """Chunks of 1024 elements over 3 rows of 1280: a chunk ends inside a row, and the last one is short."""
    monkeypatch.setattr("ostinato.weights.gguf._CHUNK_ELEMENTS", 1024)
    block_size, type_bytes = gguf.GGML_QUANT_SIZES[kind]
    # Bytes below 0x40 keep every float16 scale finite.
    raw = np.random.default_rng(3).integers(0, 0x40, (3, 1280 // block_size * type_bytes), dtype=np.uint8)
    checkpoint = GgufCheckpoint(write_gguf(tiny_tensors() | {"output.weight": (raw, kind)}, "qwen2"))
    loaded = dict(checkpoint.tensors())["lm_head.weight"]
    assert torch.isfinite(loaded).all() and loaded.abs().max() > 0
    np.testing.assert_array_equal(loaded.numpy(), dequantize(raw, kind))


def test_half_types_keep_their_dtype(write_gguf) -> None:
    values = np.random.default_rng(4).standard_normal((7, 32), dtype=np.float32)
    tensors = tiny_tensors() | {
        "token_embd.weight": values.astype(np.float16),
        "output.weight": (quantize(values, Q.BF16), Q.BF16),
    }
    checkpoint = GgufCheckpoint(write_gguf(tensors, "qwen2"))
    loaded = dict(checkpoint.tensors())
    assert torch.equal(loaded["model.embed_tokens.weight"], torch.from_numpy(values).half())
    assert torch.equal(loaded["lm_head.weight"], torch.from_numpy(values).bfloat16())
    assert checkpoint.config["tie_word_embeddings"] is False


def test_quantised_rows_are_put_back_in_order(write_gguf) -> None:
    tensors = tiny_tensors()
    name = "blk.0.attn_q.weight"
    packed = quantize(interleaved(tensors[name], HEADS), Q.Q8_0)
    loaded = dict(GgufCheckpoint(write_gguf(tensors | {name: (packed, Q.Q8_0)})).tensors())
    expected = dequantize(quantize(tensors[name], Q.Q8_0), Q.Q8_0)
    np.testing.assert_array_equal(loaded["model.layers.0.self_attn.q_proj.weight"].numpy(), expected)


def test_config(write_gguf) -> None:
    config = GgufCheckpoint(write_gguf()).config
    assert config["model_type"] == "llama" and config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (3, 1, 6)
    assert (config["hidden_size"], config["intermediate_size"], config["vocab_size"]) == (32, 64, 7)
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-6, 50000.0)
    assert config["max_position_embeddings"] == 128 and config["num_hidden_layers"] == 1
    assert config["tie_word_embeddings"] is True and config["attention_bias"] is False
    assert config["rope_scaling"] is None and "rope_freq_factors" not in config and "sliding_window" not in config


def test_rope_variants(write_gguf) -> None:
    linear = GgufCheckpoint(write_gguf(rope__scaling__type="linear", rope__scaling__factor=4.0)).config
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(ConfigError, match="rope scaling type 'longrope'"):
        GgufCheckpoint(write_gguf(rope__scaling__type="longrope", rope__scaling__factor=4.0))
    factors = np.array([1.0, 2.5, 8.0], dtype=np.float32)
    checkpoint = GgufCheckpoint(write_gguf(tiny_tensors() | {"rope_freqs.weight": factors}))
    assert checkpoint.config["rope_freq_factors"] == [1.0, 2.5, 8.0]
    assert not any("rope" in name for name in checkpoint.tensor_infos())
    for wrong in (np.ones(4, np.float32), np.array([1.0, 0.0, 8.0], dtype=np.float32)):
        with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
            GgufCheckpoint(write_gguf(tiny_tensors() | {"rope_freqs.weight": wrong}))


def test_a_window_shorter_than_the_context_is_passed_on(write_gguf) -> None:
    config = GgufCheckpoint(write_gguf(attention__sliding_window=64)).config
    assert config["sliding_window"] == 64 and config["use_sliding_window"] is True
    assert "sliding_window" not in GgufCheckpoint(write_gguf(attention__sliding_window=128)).config


def test_what_cannot_be_served_is_refused_by_name(write_gguf) -> None:
    with pytest.raises(ConfigError, match="architecture 'gemma2' is not supported, only llama, qwen2, qwen3"):
        GgufCheckpoint(write_gguf(arch="gemma2"))
    with pytest.raises(ConfigError, match="mixture of experts"):
        GgufCheckpoint(write_gguf(expert_count=8))
    with pytest.raises(ConfigError, match="partial rotary"):
        GgufCheckpoint(write_gguf(rope__dimension_count=2))
    extra = {"blk.0.ssm_a": np.zeros(3, np.float32), "cls.weight": np.zeros(3, np.float32)}
    with pytest.raises(WeightError, match=r"no supported architecture uses: blk\.0\.ssm_a, cls\.weight"):
        GgufCheckpoint(write_gguf(tiny_tensors() | extra))
    odd = tiny_tensors() | {"blk.0.attn_q.weight": np.zeros((7, 32), np.float32)}
    with pytest.raises(WeightError, match=r"blk\.0\.attn_q\.weight: 7 rows are not 3 heads"):
        dict(GgufCheckpoint(write_gguf(odd)).tensors())
