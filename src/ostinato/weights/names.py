"""GGUF's tensor names and Hugging Face's, as tables. Both are fixed by their formats; nothing is guessed.

Sources: the tensor-name standard of the GGUF specification and the parameter names of the Llama, Mistral, Qwen2 and
Qwen3 modules in transformers, which all share one scheme.
"""

from __future__ import annotations

import re

GGUF_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

GGUF_BLOCK_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

ROPE_FREQS = "rope_freqs.weight"
"""Llama 3's frequency factors [head_dim / 2]: a piece of the configuration that GGUF stores as a tensor."""

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_name(gguf_name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None for one that no supported architecture has."""
    if gguf_name in GGUF_TOP_LEVEL:
        return GGUF_TOP_LEVEL[gguf_name]
    match = _BLOCK.fullmatch(gguf_name)
    if match is None or match[2] not in GGUF_BLOCK_MODULES:
        return None
    return f"model.layers.{match[1]}.{GGUF_BLOCK_MODULES[match[2]]}.{match[3]}"
