"""Opens an engine with its recording phase shown as a progress bar."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM

DOUBLING_SIZES = tuple(2**power for power in range(10))
"""1 to 512: a ladder for commands that want to be ready soon. No batch is padded to twice its size or more."""


def open_llm(model: str, **options: Any) -> LLM:
    """An LLM, ready. Raises what its constructor raises."""
    from ostinato.engine.llm import LLM
    from ostinato.progress import bar

    with ExitStack() as stack:
        updates: dict[str, Callable[[int, str], None]] = {}

        def on_progress(what: str, done: int, total: int) -> None:
            if what not in updates:
                updates[what] = stack.enter_context(bar(what, total))
            updates[what](done, "")

        return LLM(model, on_progress=on_progress, **options)
