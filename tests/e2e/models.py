"""Tiny random models of every architecture, written as Hugging Face folders, and transformers as their oracle.

T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

ARCHITECTURES = ("Llama", "Mistral", "Qwen2", "Qwen3")

BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


@dataclass(frozen=True)
class TinyModel:
    """A folder with a model, and what transformers computes from it, in float32 on the CPU."""

    path: Path

    @cached_property
    def oracle(self) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()

    @property
    def vocab_size(self) -> int:
        return int(self.oracle.config.vocab_size)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V]: row p predicts the token at p + 1."""
        with torch.no_grad():
            out: torch.Tensor = self.oracle(torch.tensor([list(token_ids)])).logits[0].float()
        return out

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        return torch.log_softmax(self.logits(token_ids), dim=-1)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What follows `prompt`, never stopping."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def build_tiny(
    folder: Path,
    arch: str = "Llama",
    *,
    seed: int = 0,
    std: float = 0.2,
    max_shard_size: str = "1GB",
    tokenizer: bool = False,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> TinyModel:
    """Writes a random model; `overrides` are config fields. `std` is large enough for greedy outputs to wander."""
    fields = {**BASE, **overrides}
    if arch == "Mistral":
        fields.setdefault("sliding_window", None)
    config = getattr(transformers, f"{arch}Config")(**fields)
    model = getattr(transformers, f"{arch}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.1, generator=generator)
            else:
                parameter.normal_(0.0, std, generator=generator)
    model.tie_weights()
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        write_tokenizer(folder, int(config.vocab_size))
    return TinyModel(folder)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Bytes as tokens: id n is byte n, except id 0, which is the special token that ends a text.

    Ids from 256 on have no token, as in models whose vocabulary is padded.
    """
    alphabet = _byte_alphabet()
    vocab = {alphabet[byte]: byte for byte in range(1, min(vocab_size, 256))} | {"<end>": 0}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of every byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


def prompts_of(lengths: Sequence[int], vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    """Random prompts without id 0, which ends a text."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lengths]
