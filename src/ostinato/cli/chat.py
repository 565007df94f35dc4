"""A conversation in the terminal. Ctrl-C stops an answer, Ctrl-D or /exit ends; /reset forgets, /stats tells."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from ostinato.cli.options import add_engine_options, add_sampling_options, engine_options, sampling_params
from ostinato.cli.session import DOUBLING_SIZES, open_llm
from ostinato.errors import ConfigError, OstinatoError

if TYPE_CHECKING:
    from ostinato.engine.llm import LLM
    from ostinato.request import SamplingParams

DEFAULTS: dict[str, Any] = {"max_tokens": 1024, "temperature": 0.7}
ENGINE_DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 512,
    "cudagraph_capture_sizes": DOUBLING_SIZES,
}
"""One conversation is one row, and few recordings are made soon."""

HELP = "/exit ends, /reset forgets the conversation, /stats tells what the engine did; Ctrl-C stops an answer"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ostinato chat [OPTIONS] MODEL"
    add_engine_options(parser, **ENGINE_DEFAULTS)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_options(parser, **DEFAULTS)


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args, **DEFAULTS)
    if params.n != 1:
        raise ConfigError(f"--n {params.n}: a chat has one answer at a time")
    with contextlib.suppress(ImportError):  # line editing and history for input(); not built on every platform
        import readline  # noqa: F401
    with open_llm(args.model, **ENGINE_DEFAULTS | engine_options(args)) as llm:
        print(HELP, file=sys.stderr)
        Conversation(llm, params, args.system).loop()
    return 0


class Conversation:
    """Messages so far, and the loop that adds to them. `read` returns a line or raises EOFError."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, read: Callable[[str], str] = input
    ) -> None:
        self._llm, self._params, self._read = llm, params, read
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._opening)

    def loop(self) -> None:
        while True:
            try:
                line = self._read("> ").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print(f"\n{HELP}", file=sys.stderr)
                continue
            if line == "/exit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                try:
                    self.say(line)
                except OstinatoError as error:
                    print(f"error: {error}; /reset begins anew", file=sys.stderr)

    def say(self, text: str) -> None:
        """One turn. A stopped answer stays in the conversation as far as it came; a refused one leaves no trace."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        stream = self._llm.stream(self._llm.chat_prompt(asked), self._params)
        with _stop_on_interrupt() as stopped, contextlib.closing(stream) as deltas:
            for delta in deltas:
                answer += delta.text
                print(delta.text, end="", flush=True)
                if stopped():
                    break
        print(" [stopped]" if stopped() else "")
        self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _command(self, line: str) -> None:
        if line == "/reset":
            self.messages = list(self._opening)
        elif line == "/stats":
            from ostinato.cli.report import make_console, print_stats

            print_stats(self._llm.stats(), make_console(sys.stderr))
        else:
            print(f"unknown command {line}: {HELP}", file=sys.stderr)


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag instead of raising, so that no step is torn apart; a second one raises after all."""
    count = 0

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, before)
