"""`python -m tests.server.breaking MODEL NUM_STEPS KIND`: a server whose engine breaks after so many steps.

KIND is `raise`, which a step does, or `hang`, where a step never comes back.
"""

from __future__ import annotations

import logging
import sys
import threading

from ostinato import LLM
from ostinato.engine.async_engine import AsyncEngine
from ostinato.engine.output import Delta
from ostinato.server.run import ServerConfig, run_server


def main(path: str, num_steps: int, kind: str) -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")

    def open_llm() -> LLM:
        llm = LLM(path, max_num_seqs=4, max_model_len=192, max_num_batched_tokens=32, num_gpu_blocks_override=64)
        step, seen = llm.engine.step, []

        def breaking() -> list[Delta]:
            seen.append(1)
            if len(seen) > num_steps:
                if kind == "hang":
                    threading.Event().wait()
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return step()

        llm.engine.step = breaking  # type: ignore[method-assign]
        return llm

    return run_server(AsyncEngine(open_llm), ServerConfig(port=0, model_names=["tiny"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
