"""Measurements in processes of their own: what a process did before changes what memory and recordings take."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from ostinato.errors import OstinatoError

MARK = "RESULT "
"""Begins the one line of a worker's standard output that is its answer."""


def run_fresh(job: dict[str, Any]) -> dict[str, Any]:
    """What `worker` answers to `job`; its progress and its warnings go to standard error as ours do.

    The job also gets `started_at`, the moment before the process exists, on the clock that all processes share.
    Raises OstinatoError, with the worker's message where it had one.
    """
    command = [sys.executable, "-m", "ostinato.cli.bench.worker"]
    job = job | {"started_at": time.monotonic()}
    done = subprocess.run(command, input=json.dumps(job), stdout=subprocess.PIPE, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    answer: dict[str, Any] = {} if line is None else json.loads(line.removeprefix(MARK))
    if "error" in answer:
        raise OstinatoError(answer["error"])
    if done.returncode or line is None:
        raise OstinatoError(f"the process that measured {job['what']} ended with exit code {done.returncode}")
    return answer
