"""From the fields of a request to `SamplingParams`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ostinato.request import SamplingParams, StructuredOutputsParams
from ostinato.server.schema import SamplingFields

_OTHERWISE = {"logit_bias", "logprobs", "max_tokens", "structured_outputs"}
_SAME_NAME = ({field.name for field in fields(SamplingParams)} & set(SamplingFields.model_fields)) - _OTHERWISE


def sampling_params(
    request: SamplingFields,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    detokenize: bool = True,
    structured_outputs: StructuredOutputsParams | None = None,
    show_special_tokens: bool = False,
) -> SamplingParams:
    """Fields that were left out, or are null, keep the defaults, `skip_special_tokens` only where they need not be
    shown. Raises ConfigError, with the field."""
    given: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    if show_special_tokens:
        given["skip_special_tokens"] = False
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=None if request.logit_bias is None else {int(k): v for k, v in request.logit_bias.items()},
        detokenize=detokenize,
        structured_outputs=structured_outputs,
    )
