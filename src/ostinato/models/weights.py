"""A decoder's parameters: fused where the kernels want them fused, filled from a checkpoint by Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch

from ostinato.errors import WeightError
from ostinato.models.config import ModelConfig
from ostinato.models.kv_scales import is_scale


@dataclass(slots=True)
class LayerWeights:
    """One layer. Matrices are [out, in], as stored. `qkv` stacks q, k and v rows; `gate_up` stacks gate and up."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(slots=True)
class DecoderWeights:
    embed: torch.Tensor  # [V, hidden]
    layers: list[LayerWeights]
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [V, hidden]; the same tensor as `embed` when tied

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once, with the name that errors use."""
        yield "embed", self.embed
        for index, layer in enumerate(self.layers):
            for field in fields(layer):
                if (tensor := getattr(layer, field.name)) is not None:
                    yield f"layers.{index}.{field.name}", tensor
        yield "norm", self.norm
        if self.head is not self.embed:
            yield "head", self.head

    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.named())


def allocate(config: ModelConfig, empty: Callable[[Sequence[int]], torch.Tensor]) -> DecoderWeights:
    """Parameters of the right shapes, each made by `empty(shape)`, always in the same order."""
    h, i, d = config.hidden_size, config.intermediate_size, config.head_dim

    def new(*shape: int) -> torch.Tensor:
        return empty(shape)

    def layer() -> LayerWeights:
        return LayerWeights(
            input_norm=new(h),
            qkv=new(config.qkv_size, h),
            o=new(h, config.query_size),
            post_norm=new(h),
            gate_up=new(2 * i, h),
            down=new(h, i),
            qkv_bias=new(config.qkv_size) if config.attention_bias else None,
            o_bias=new(h) if config.output_bias else None,
            gate_up_bias=new(2 * i) if config.mlp_bias else None,
            down_bias=new(h) if config.mlp_bias else None,
            q_norm=new(d) if config.qk_norm else None,
            k_norm=new(d) if config.qk_norm else None,
        )

    embed = new(config.vocab_size, h)
    head = embed if config.tie_word_embeddings else new(config.vocab_size, h)
    return DecoderWeights(embed=embed, layers=[layer() for _ in range(config.num_layers)], norm=new(h), head=head)


def destinations(config: ModelConfig, weights: DecoderWeights) -> dict[str, torch.Tensor]:
    """Hugging Face tensor name -> the view it fills."""
    q, kv, i = config.query_size, config.kv_size, config.intermediate_size
    places = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.norm}
    if not config.tie_word_embeddings:
        places["lm_head.weight"] = weights.head
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        places[prefix + "input_layernorm.weight"] = layer.input_norm
        places[prefix + "post_attention_layernorm.weight"] = layer.post_norm
        for kind, matrix, bias in (("weight", layer.qkv, layer.gate_up), ("bias", layer.qkv_bias, layer.gate_up_bias)):
            if matrix is not None:
                places[prefix + f"self_attn.q_proj.{kind}"] = matrix[:q]
                places[prefix + f"self_attn.k_proj.{kind}"] = matrix[q : q + kv]
                places[prefix + f"self_attn.v_proj.{kind}"] = matrix[q + kv :]
            if bias is not None:
                places[prefix + f"mlp.gate_proj.{kind}"] = bias[:i]
                places[prefix + f"mlp.up_proj.{kind}"] = bias[i:]
        rest = {
            "self_attn.o_proj.weight": layer.o,
            "self_attn.o_proj.bias": layer.o_bias,
            "mlp.down_proj.weight": layer.down,
            "mlp.down_proj.bias": layer.down_bias,
            "self_attn.q_norm.weight": layer.q_norm,
            "self_attn.k_norm.weight": layer.k_norm,
        }
        places.update({prefix + name: tensor for name, tensor in rest.items() if tensor is not None})
    return places


def check_names(
    config: ModelConfig, places: dict[str, torch.Tensor], infos: dict[str, tuple[tuple[int, ...], object]]
) -> None:
    """Raises one WeightError that lists every missing, unexpected and misshapen tensor, before any is read."""
    missing = [name for name in places if name not in infos]
    unexpected = [name for name in infos if name not in places and not is_ignorable(name, config)]
    misshapen = [
        f"{name}: {list(infos[name][0])} in the checkpoint, {list(place.shape)} by the config"
        for name, place in places.items()
        if name in infos and tuple(infos[name][0]) != tuple(place.shape)
    ]
    if missing or unexpected or misshapen:
        parts = [
            f"{title} ({len(names)}):\n    " + "\n    ".join(names)
            for title, names in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
            if names
        ]
        raise WeightError("the checkpoint does not fit the model:\n  " + "\n  ".join(parts))


def is_ignorable(name: str, config: ModelConfig) -> bool:
    """Buffers that old checkpoints store, the copy of a tied head, and scales of the KV cache, which are no parameters
    of the model."""
    if name.endswith("rotary_emb.inv_freq") or is_scale(name):
        return True
    return name == "lm_head.weight" and config.tie_word_embeddings


def fill(places: dict[str, torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copies each checkpoint tensor to its place, casting to the parameter's dtype."""
    with torch.no_grad():
        for name, tensor in tensors:
            if (place := places.get(name)) is not None:
                place.copy_(tensor)


def fill_random(weights: DecoderWeights, seed: int) -> None:
    """Random weights for `load_format="dummy"`: normal with 0.02, norms at one, biases small."""
    generator = torch.Generator(device=weights.embed.device).manual_seed(seed)
    with torch.no_grad():
        for name, tensor in weights.named():
            if "norm" in name:
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, 0.02, generator=generator)
