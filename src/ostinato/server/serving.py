"""What every route works with. Made once by `create_app` and handed to the routes; nothing of it is global."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from ostinato.engine.async_engine import AsyncEngine
from ostinato.server.errors import APIError

T = TypeVar("T")

INLINE_CHARS = 4096
"""Shorter text is tokenized on the event loop: it takes less than a hop to a thread and back."""

DEFAULT_MAX_BODY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Serving:
    """`model_names` are what clients may call the model, the first one in answers. Bodies end at `max_body_bytes`.
    `tool_call_parser` names how the model writes calls, None where it may not decide to call."""

    engine: AsyncEngine
    model_names: tuple[str, ...]
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    tool_call_parser: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    # two, so that one long prompt does not hold up the next, and many do not take all cores
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "ostinato-text"))

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Raises APIError 404 for a model that is not served; none named is the one there is."""
        if name is not None and name not in self.model_names:
            raise APIError(
                404,
                f"the model {name!r} does not exist: {', '.join(map(repr, self.model_names))} is served here",
                param="model",
                code="model_not_found",
            )

    def room_after(self, num_prompt_tokens: int) -> int:
        """Tokens that an answer may have when nothing else limits it, at least 1."""
        return max(1, self.engine.info.max_sequence_len - num_prompt_tokens)

    async def aside(self, function: Callable[[], T], num_chars: int) -> T:
        """Runs work on text without holding up the event loop when the text is long."""
        if num_chars <= INLINE_CHARS:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
