"""`python -m ostinato.cli`, for when the package is on the path but not installed."""

from __future__ import annotations

import sys

from ostinato.cli.main import main

sys.exit(main())
