"""Where a serving engine is in its life, and what is known about it once it is ready. No torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ostinato.engine.stats import EngineStats
from ostinato.errors import UnavailableError
from ostinato.tokenizer.tokenizer import Tokenizer


class EngineState(enum.StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    DEAD = "dead"  # it failed, at the start or later
    CLOSED = "closed"


_REFUSALS = {
    EngineState.STARTING: "the engine is starting: try again in a moment",
    EngineState.DRAINING: "the server is shutting down and takes no new requests",
    EngineState.CLOSED: "the server has shut down",
}


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What never changes about an engine that is ready. `stats` are those of its start."""

    tokenizer: Tokenizer | None
    stats: EngineStats

    @property
    def max_sequence_len(self) -> int:
        """Tokens of prompt and output that one request can have: the model's limit, or what the KV pool holds. The
        last token has no KV."""
        pool = (self.stats.num_blocks - 1) * self.stats.block_size + 1
        return min(self.stats.max_model_len, pool)


def refusal(state: EngineState) -> UnavailableError:
    """Why no request is taken in this state."""
    return UnavailableError(_REFUSALS.get(state, _REFUSALS[EngineState.STARTING]))
