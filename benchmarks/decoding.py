"""Requests that decode side by side, and the time from one of their tokens to the next."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ostinato import SamplingParams
from ostinato.engine.engine import Engine


class UnexpectedError(RuntimeError):
    """What ran is not what was to be measured."""


class Decoding:
    """One request for each prompt, greedy, no stop, no text. They all decode once this is made, which takes up to as
    many of their tokens as the prompts take steps. `max_tokens` must last until `stop`."""

    def __init__(self, engine: Engine, prompts: Sequence[list[int]], max_tokens: int) -> None:
        self._engine = engine
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, detokenize=False)
        self.states = [engine.add_request(f"d{number}", ids, params) for number, ids in enumerate(prompts)]
        self._ids = {state.request.request_id for state in self.states}
        while min(len(state.request.output_token_ids) for state in self.states) < 2:
            engine.step()
        self._last = time.perf_counter()

    def tick(self) -> float:
        """Seconds since the tokens before, once each request has another one. Raises UnexpectedError for a step that
        leaves one out."""
        deltas = self._engine.step()
        now = time.perf_counter()
        if not self._ids <= {delta.request_id for delta in deltas}:
            raise UnexpectedError("a step left out one of the requests that decode")
        passed, self._last = now - self._last, now
        return passed

    def ticks(self, count: int) -> list[float]:
        return [self.tick() for _ in range(count)]

    def mean_context(self) -> float:
        """Tokens of a sequence."""
        return sum(len(state.request.tokens) for state in self.states) / len(self.states)

    def stop(self) -> None:
        """Ends them all. Raises UnexpectedError if one has ended by itself."""
        if any(state.request.finished for state in self.states):
            raise UnexpectedError("a request that decodes ended too early")
        for state in self.states:
            self._engine.abort(state.request.request_id)
        while self._engine.has_unfinished:
            self._engine.step()
