"""The output of one call to a serving engine, on the event loop's side: deltas of all its answers as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

from ostinato.engine.output import Delta, OutputState
from ostinato.request import SamplingParams, TokenGrammar


class Submission(NamedTuple):
    """One sequence to generate. `grammar` is its own (`AsyncEngine.compile_grammars`); without one, the engine's thread
    compiles what `params.structured_outputs` asks for."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    grammar: TokenGrammar | None = None


class Piece(NamedTuple):
    """What tokens that came together added to one answer: the number of its submission in the call."""

    answer: int
    delta: Delta


@dataclass(slots=True)
class Member:
    """One answer of a stream while it is open. Times in seconds of `time.perf_counter`."""

    stream: RequestStream
    answer: int
    num_prompt_tokens: int
    arrived_at_s: float
    last_token_s: float | None = None
    delivered: list[Delta] = field(default_factory=list)  # of the batch that is being handed out


@dataclass(slots=True)
class RequestStream(AsyncIterator[list[Piece]]):
    """Yields all that came since it was last asked, at least one piece, until every answer has finished.

    A context manager: leaving it aborts what is unfinished, as does `close`, after which nothing more comes. A failed
    engine raises its EngineDeadError here. One task at a time may wait. `outputs` are what the pieces add up to, in the
    order of submission; of an unfinished answer only what its first token settles may be read (`prompt_logprobs`,
    `request.num_cached_tokens`).
    """

    request_ids: tuple[str, ...]
    _abort: Callable[[RequestStream], None]
    outputs: tuple[OutputState, ...] = ()
    _pieces: list[Piece] = field(default_factory=list)
    _num_open: int = 0
    _error: Exception | None = None
    _waiter: asyncio.Future[None] | None = None

    def __post_init__(self) -> None:
        self._num_open = len(self.request_ids)

    @property
    def finished(self) -> bool:
        """Whether nothing more will be added; pieces may still be there to take."""
        return self._num_open == 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Piece]:
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._num_open == 0:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pieces, self._pieces = self._pieces, []
        return pieces

    def push(self, piece: Piece) -> None:
        """For the engine: one more piece."""
        self._pieces.append(piece)
        self._num_open -= piece.delta.finished
        self._wake()

    def fail(self, error: Exception) -> None:
        """For the engine: no more will come, and why. What came before is handed out first."""
        if self._num_open:
            self._num_open, self._error = 0, error
            self._wake()

    def close(self) -> None:
        """Aborts what is unfinished and drops what was not taken. A task that waits sees the end."""
        if self._num_open:
            self._num_open = 0
            self._abort(self)
        self._pieces.clear()
        self._wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
