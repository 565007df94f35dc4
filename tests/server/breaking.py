"""`python -m tests.server.breaking NUM_STEPS KIND serve MODEL ...`: `ostinato`, which breaks after so many steps.

KIND is `raise`, which a step does, `hang`, where a step never comes back, or a path: steps are slow until it exists.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from pathlib import Path

from ostinato.cli.main import main
from ostinato.engine.engine import Engine
from ostinato.engine.output import Delta

SLOW_S = 0.2


def break_after(num_steps: int, kind: str) -> None:
    step, seen = Engine.step, []

    def breaking(engine: Engine) -> list[Delta]:
        seen.append(1)
        if len(seen) > num_steps:
            if kind == "raise":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if kind == "hang":
                logging.getLogger("ostinato").warning("a step hangs")
                threading.Event().wait()
            if not Path(kind).exists():
                time.sleep(SLOW_S)
        return step(engine)

    Engine.step = breaking  # type: ignore[method-assign]


if __name__ == "__main__":
    break_after(int(sys.argv[1]), sys.argv[2])
    sys.exit(main(sys.argv[3:]))
