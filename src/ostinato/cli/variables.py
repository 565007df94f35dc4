"""The one place that reads environment variables. They hold what does not belong on a command line: secrets."""

from __future__ import annotations

import os


def api_key() -> str | None:
    """`OSTINATO_API_KEY`; None where it is not set or empty."""
    return os.environ.get("OSTINATO_API_KEY") or None
