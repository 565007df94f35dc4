"""A model's shape, read from a Hugging Face `config.json` dictionary. What cannot be served is refused by name here,
before any weight is read. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ostinato.errors import ConfigError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `kind` is "default", "linear" or "llama3".

    `factor`: position stretch (linear, llama3). The other three are llama3's. `frequency_divisors` (one per rotated
    pair) replaces the formula where a checkpoint stores its result, as GGUF files do.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    frequency_divisors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder. `head_dim` need not be `hidden_size / num_heads`. `rotary_dim` <= `head_dim`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.query_size + 2 * self.kv_size

    def num_parameters(self) -> int:
        """Every stored weight once (a tied head is the embedding)."""
        h, i = self.hidden_size, self.intermediate_size
        layer = self.qkv_size * h + h * self.query_size + 3 * i * h + 2 * h
        layer += (self.qkv_size if self.attention_bias else 0) + (h if self.output_bias else 0)
        layer += (2 * i + h if self.mlp_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        return self.num_layers * layer + self.vocab_size * h * (1 if self.tie_word_embeddings else 2) + h

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.num_layers * self.kv_size * itemsize


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """Raises ConfigError that names every field that is missing or cannot be served."""
    names = config.get("architectures") or []
    architecture = next((name for name in names if name in ARCHITECTURES), None)
    model_type = ARCHITECTURES[architecture] if architecture else str(config.get("model_type"))
    if (names and architecture is None) or model_type not in ARCHITECTURES.values():
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"architecture {names or model_type!r} is not supported: Ostinato runs {known}")
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if missing := [name for name in required if not isinstance(config.get(name), int)]:
        raise ConfigError(f"config.json lacks {', '.join(missing)} (or they are not whole numbers)")
    if refused := _refusals(config, model_type):
        raise ConfigError("this model asks for what Ostinato does not do:\n  " + "\n  ".join(refused))

    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    rope = _rope_fields(config)
    partial = float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    llama_like = model_type in ("llama", "mistral")
    attention_bias = bool(config.get("attention_bias", False)) if model_type != "qwen2" else True
    return ModelConfig(
        model_type=model_type,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=int(head_dim * partial),
        max_position_embeddings=int(config.get("max_position_embeddings") or 2048),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_parse_rope(config, rope),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=attention_bias,
        output_bias=attention_bias and model_type != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)) if llama_like else False,
        qk_norm=model_type == "qwen3",
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _refusals(config: Mapping[str, Any], model_type: str) -> list[str]:
    found: list[str] = []
    window = config.get("sliding_window")
    uses_window = config.get("use_sliding_window", model_type == "mistral")
    if window is not None and uses_window:
        found.append(f"sliding_window={window}: attention is over the whole context (null serves contexts below it)")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        found.append("layer_types other than full_attention")
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        found.append(f"hidden_act={act!r}: only silu")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unnamed")
        found.append(f"quantization_config ({method}): use an unquantised checkpoint, or a GGUF file")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(name):
            found.append(f"{name}={config[name]}: mixtures of experts")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "attention_multiplier", "residual_multiplier"):
        if config.get(name):
            found.append(f"{name}={config[name]}")
    rope = _rope_fields(config)
    if (kind := rope.get("rope_type", rope.get("type", "default"))) not in ("default", "linear", "llama3"):
        found.append(f"rope scaling {kind!r}: only default, linear and llama3")
    heads = config.get("num_attention_heads") or 1
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
    if head_dim > 256 or head_dim % 2:
        found.append(f"head_dim={head_dim}: at most 256 and even")
    return found


def _rope_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Transformers 5 writes `rope_parameters`, earlier versions `rope_scaling` beside `rope_theta`."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _parse_rope(config: Mapping[str, Any], rope: Mapping[str, Any]) -> RopeConfig:
    kind = rope.get("rope_type", rope.get("type", "default"))
    divisors = config.get("rope_freq_factors")
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}.get(kind, ())
    if missing := [name for name in needed if name not in rope]:
        raise ConfigError(f"rope scaling {kind!r} lacks {', '.join(missing)}")
    return RopeConfig(
        theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        kind=kind,
        factor=float(rope.get("factor") or 1.0),
        low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
        high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
        original_max_position_embeddings=int(rope.get("original_max_position_embeddings") or 8192),
        frequency_divisors=tuple(float(x) for x in divisors) if divisors else None,
    )
