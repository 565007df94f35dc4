"""The thread that owns a serving engine. It makes the engine, steps it, and runs what others ask for between steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from ostinato.engine.llm import LLM
from ostinato.engine.output import Delta

logger = logging.getLogger("ostinato")

Command = Callable[[LLM], None]
"""Runs on the engine's thread between two steps. What it raises is a fault of the engine."""


class EngineThread:
    """`open_llm` is called on the thread, and so are the others, which must hand on what they are told and return:

    on_opened(llm)            the engine is ready; before any command runs.
    on_stepped(deltas, at_s)  a step was collected and gave these tokens; `at_s` is of `time.perf_counter`.
    on_ended(error)           no command will run any more: the engine was stopped (None), never came up, or has failed.

    A daemon, because a step that hangs must not keep a process alive.
    """

    def __init__(
        self,
        open_llm: Callable[[], LLM],
        *,
        on_opened: Callable[[LLM], None],
        on_stepped: Callable[[Sequence[Delta], float], None],
        on_ended: Callable[[BaseException | None], None],
    ) -> None:
        self._open_llm = open_llm
        self._on_opened, self._on_stepped, self._on_ended = on_opened, on_stepped, on_ended
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ostinato-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def between_steps(self, command: Command) -> None:
        """Safe from any thread: commands run in the order given, at once when the engine is idle."""
        self._commands.put(command)

    def stop(self) -> None:
        """Ends the thread after the running step; open requests are dropped. Safe from any thread."""
        self.between_steps(self._stop)

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the thread's end, for `timeout_s` at most; whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _stop(self, llm: LLM) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            llm = self._open_llm()
        except BaseException as error:
            self._on_ended(error)
            return
        try:
            self._on_opened(llm)
            self._serve(llm)
        except BaseException as error:
            logger.exception("the engine failed")
            # before closing: after a device fault that may take long, or never come back
            self._on_ended(error)
            _close(llm)
        else:
            _close(llm)
            self._on_ended(None)

    def _serve(self, llm: LLM) -> None:
        engine = llm.engine
        while True:
            self._run_commands(llm, wait=not engine.can_step and not engine.idle())
            if self._stopping:
                return
            if engine.can_step:
                deltas = engine.step()
                if deltas:
                    self._on_stepped(deltas, time.perf_counter())

    def _run_commands(self, llm: LLM, *, wait: bool) -> None:
        try:
            while not self._stopping:
                self._commands.get(block=wait)(llm)
                wait = False
        except Empty:
            pass


def _close(llm: LLM) -> None:
    try:
        llm.close()
    except Exception:
        logger.exception("closing the engine failed")
