"""The scales of a quantised KV cache that a checkpoint may carry, under the names that quantisers write.

Sources: vLLM's and compressed-tensors' parameters of an attention layer (`k_scale`, `v_scale`), which older files keep
at the projections (`k_proj.k_scale`, `k_proj.output_scale`), and one scale for both (`kv_scale`). What is stored times
the scale is the value. One number, or one for each kv head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from ostinato.errors import WeightError

__all__ = ["fill_scales", "is_scale", "scale_places", "write_scale"]

_NAME = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:attn\.|qkv_proj\.|k_proj\.|v_proj\.)?(?P<kind>kv|k|v)_scale|(?P<projection>k|v)_proj\.output_scale)"
)


def is_scale(name: str) -> bool:
    """Whether a checkpoint's tensor of this name is a scale of the KV cache."""
    return _NAME.fullmatch(name) is not None


def scale_places(name: str, scales: torch.Tensor) -> list[torch.Tensor]:
    """The rows [G] of `scales` [L, 2, G] that the tensor `name` sets. Raises WeightError for a layer that is none."""
    match = _NAME.fullmatch(name)
    if match is None or int(match["layer"]) >= scales.shape[0]:
        raise WeightError(f"{name!r} is no scale of this model's KV cache")
    kind = match["kind"] or match["projection"]
    keys, values = scales[int(match["layer"])]
    return [keys] * (kind in ("k", "kv")) + [values] * (kind in ("v", "kv"))


def write_scale(name: str, tensor: torch.Tensor, scales: torch.Tensor) -> None:
    """Overwrites what the tensor `name`, of one element or one for each kv head, sets of `scales` [L, 2, G]. Raises
    WeightError for another shape, and for numbers that are not finite and above 0."""
    places, numbers = scale_places(name, scales), tensor.detach().float().reshape(-1)
    if numbers.numel() not in (1, scales.shape[2]):
        raise WeightError(
            f"{name} has the shape {list(tensor.shape)}: a scale of the KV cache is one number, or one for each of the "
            f"{scales.shape[2]} kv heads"
        )
    if not bool((numbers.isfinite() & (numbers > 0)).all()):
        raise WeightError(f"{name} is {numbers.tolist()}: a scale must be finite and above 0")
    for place in places:
        place.copy_(numbers.expand_as(place))


def fill_scales(tensors: Iterable[tuple[str, torch.Tensor]], scales: torch.Tensor) -> bool:
    """Overwrites all of `scales` [L, 2, G] from a checkpoint's tensors; False, and nothing is written, where it has
    none. Raises WeightError where it has some and not all."""
    found = [(name, tensor) for name, tensor in tensors if is_scale(name)]
    if not found:
        return False
    new = torch.full(scales.shape, float("nan"))
    for name, tensor in found:
        write_scale(name, tensor.cpu(), new)
    missing = [
        f"layer {layer} of the {kind}"
        for layer in range(len(new))
        for kind, row in zip(("keys", "values"), new[layer], strict=True)
        if bool(row.isnan().any())
    ]
    if missing:
        raise WeightError(f"the checkpoint has scales for the KV cache, but none for: {', '.join(missing)}")
    scales.copy_(new)
    return True
