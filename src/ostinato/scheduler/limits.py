"""What can be served at all: the limits of rows, tokens and length, and the check of a request against them."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.errors import CapacityError, ConfigError
from ostinato.kv.manager import KVManager
from ostinato.request import Request, RequestStatus
from ostinato.scheduler.stop import max_length

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Rows, tokens of a step, and tokens of a sequence. Raises ConfigError for values that cannot work."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        for name, least in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("max_model_len", 2)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least {least}")

    def check(self, request: Request, kv: KVManager) -> None:
        """Raise ConfigError for a request that cannot be served, CapacityError for one that the pool cannot hold."""
        name, num_prompt = f"request {request.request_id!r}", request.num_prompt_tokens
        if request.status is not RequestStatus.WAITING or request.num_computed:
            raise ConfigError(f"{name} was scheduled before ({request.status.value})")
        if num_prompt == 0:
            raise ConfigError(f"{name} has an empty prompt")
        if num_prompt >= self.max_model_len:
            raise ConfigError(
                f"{name} has a prompt of {num_prompt} tokens and max_model_len is {self.max_model_len}: "
                f"there is no room for an output token. Shorten the prompt or raise max_model_len."
            )
        num_tokens = max_length(request, self.max_model_len) - 1  # the last token never runs, so it has no KV
        num_blocks = kv.num_blocks_for(num_tokens)
        if num_blocks > kv.num_allocatable:
            raise CapacityError(
                f"{name} has a prompt of {num_prompt} tokens and may grow to {num_tokens + 1}: that needs {num_blocks} "
                f"KV blocks of {kv.block_size} and the pool has {kv.num_allocatable}. "
                f"Lower max_tokens or give the KV cache more memory."
            )
