"""SamplingParams -> the values of one row of the request state. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.request import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams

FLAG_PENALTIES = 1
FLAG_LOGIT_BIAS = 2
FLAG_MIN_LENGTH = 4
FLAG_ALLOWED = 8


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row. `ints` and `floats` are scalar fields by name; the two lists are padded by the state to their width."""

    ints: dict[str, int]
    floats: dict[str, float]
    stop_ids: tuple[int, ...]
    bias_ids: tuple[int, ...]
    bias_values: tuple[float, ...]

    @property
    def has_penalties(self) -> bool:
        return bool(self.ints["flags"] & FLAG_PENALTIES)


def sampling_row(
    params: SamplingParams, *, num_prompt_tokens: int, stop_token_ids: Sequence[int], seed: int
) -> SamplingRow:
    """`seed` is 64 bits wide and taken modulo that."""
    penalties = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    bias = tuple((params.logit_bias or {}).items())[:MAX_LOGIT_BIAS]
    flags = (
        FLAG_PENALTIES * penalties
        + FLAG_LOGIT_BIAS * bool(bias)
        + FLAG_MIN_LENGTH * bool(params.min_tokens and stop_token_ids)
        + FLAG_ALLOWED * (params.structured_outputs is not None)
    )
    return SamplingRow(
        ints={
            "top_k": max(params.top_k, 0),
            "num_logprobs": -1 if params.logprobs is None else params.logprobs,
            "seed_lo": _int32(seed),
            "seed_hi": _int32(seed >> 32),
            "min_length": num_prompt_tokens + params.min_tokens,
            "flags": flags,
        },
        floats={
            "temperature": params.temperature,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
        },
        stop_ids=tuple(sorted(stop_token_ids))[:MAX_STOP_IDS],
        bias_ids=tuple(token for token, _ in bias),
        bias_values=tuple(float(value) for _, value in bias),
    )


def _int32(value: int) -> int:
    """The low 32 bits as a signed number."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value
