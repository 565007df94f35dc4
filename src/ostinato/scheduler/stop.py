"""When a request ends by itself: on a stop id, or at its length. Stop strings need text and are the engine's."""

from __future__ import annotations

from ostinato.request import FinishReason, Request

__all__ = ["check_stop", "max_length"]


def max_length(request: Request, max_model_len: int) -> int:
    """Tokens, prompt and output together, at which the request ends."""
    max_tokens = request.params.max_tokens
    return max_model_len if max_tokens is None else min(len(request.prompt_token_ids) + max_tokens, max_model_len)


def check_stop(request: Request, max_model_len: int) -> FinishReason | None:
    """Why the request ends with its newest token, or None.

    A stop id ends it once `min_tokens` are out (the device bans stop ids until then, so a ban that fails is not taken
    for an end). `Request.stop_token_ids` already leaves out eos when the request ignores it. A stop id at the very
    last position counts as a stop.
    """
    num_outputs = len(request.tokens) - request.num_prompt_tokens
    if num_outputs < 1:
        return None
    if num_outputs >= request.params.min_tokens and request.tokens[-1] in request.stop_token_ids:
        return FinishReason.STOP
    if len(request.tokens) >= max_length(request, max_model_len):
        return FinishReason.LENGTH
    return None
