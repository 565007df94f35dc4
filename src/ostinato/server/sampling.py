"""From the fields of a request to `SamplingParams`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ostinato.request import SamplingParams
from ostinato.server.schema import SamplingFields

_OTHERWISE = {"logit_bias", "logprobs", "max_tokens"}
_SAME_NAME = ({field.name for field in fields(SamplingParams)} & set(SamplingFields.model_fields)) - _OTHERWISE


def sampling_params(
    request: SamplingFields,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    detokenize: bool = True,
) -> SamplingParams:
    """Fields that were left out, or are null, keep the defaults. Raises ConfigError, with the field."""
    given: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=None if request.logit_bias is None else {int(k): v for k, v in request.logit_bias.items()},
        detokenize=detokenize,
    )
