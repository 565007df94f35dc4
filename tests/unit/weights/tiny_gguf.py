"""Tiny GGUF models, written with the gguf package's own writer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 3, 1, 6, 32, 64, 7


def tiny_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """A one-layer Llama in Hugging Face's row order, under GGUF's names, float32."""
    shapes = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_tiny(
    path: Path,
    tensors: dict[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    arch: str = "llama",
    **metadata: str | float | int,
) -> Path:
    """A GGUF file of the tiny shape. `metadata` belongs to the architecture; `__` in a key stands for a dot."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(50000.0)
    adders = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    for key, value in metadata.items():
        adders[type(value)](f"{arch}.{key.replace('__', '.')}", value)
    for name, tensor in (tiny_tensors() if tensors is None else tensors).items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
