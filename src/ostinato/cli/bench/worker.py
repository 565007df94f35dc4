"""The other end of `fresh`: reads a job from standard input, does it, and prints its answer as one line of JSON."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from ostinato.cli.bench.fresh import MARK
from ostinato.cli.main import EXIT_ERROR, EXIT_INTERRUPTED
from ostinato.errors import OstinatoError


def main() -> int:
    job: dict[str, Any] = json.load(sys.stdin)
    try:
        answer, code = importlib.import_module(f"ostinato.cli.bench.{job['what']}").work(job), 0
    except OstinatoError as error:
        answer, code = {"error": str(error)}, EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    print(MARK + json.dumps(answer), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
