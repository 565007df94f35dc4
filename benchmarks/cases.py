"""One case of a benchmark in a process of its own: what an earlier one left in a process is not measured with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MARK = "RESULT "
"""Begins the line with the result of a process that measured."""


class CaseError(RuntimeError):
    """A case whose process did not end well, or gave no result."""


def hand_over(result: dict[str, Any]) -> None:
    """What `run_case` returns in the process that waits for this one."""
    print(_MARK + json.dumps(result), flush=True)


def run_case(script: Path, words: Sequence[str], case: str) -> dict[str, Any]:
    """`python script *words --inside case`, with this process's environment. What it says on standard error is shown.

    Raises CaseError with the exit code.
    """
    own = [sys.executable, str(script), *words, "--inside", case]
    done = subprocess.run(own, stdout=subprocess.PIPE, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith(_MARK)), None)
    if done.returncode or line is None:
        raise CaseError(f"{case} ended with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
    return found
