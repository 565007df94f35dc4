"""A process whose output is shown while it runs and kept for when it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

_TAIL_LINES = 25


@dataclass(frozen=True, slots=True)
class Finished:
    """All lines of its output, standard error among them; `error` is empty where it ended well."""

    lines: list[str]
    error: str


def run_process(command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None) -> Finished:
    """Ends the process, and those it started, when it takes too long or when this one is interrupted."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
        )
    except OSError as error:
        return Finished([], f"{command[0]} cannot be started: {error.strerror}")
    too_long = threading.Event()

    def give_up() -> None:
        too_long.set()
        _kill(process)

    timer = threading.Timer(timeout_s, give_up)
    timer.start()
    lines = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            print(lines[-1], file=sys.stderr, flush=True)
        code = process.wait()
    except BaseException:
        _kill(process)
        raise
    finally:
        timer.cancel()
    tail = "\n".join(lines[-_TAIL_LINES:])
    if too_long.is_set():
        return Finished(lines, f"ended after {timeout_s:g} s\n{tail}")
    return Finished(lines, f"exit code {code}\n{tail}" if code else "")


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
