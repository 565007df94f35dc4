from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from kv_transports import StandIn, needs_nixl


@pytest.fixture(params=["tcp", "stand-in", pytest.param("nixl", marks=needs_nixl)])
def nixl(request: pytest.FixtureRequest) -> Any | None:
    """None for TCP."""
    if request.param == "tcp":
        return None
    return StandIn() if request.param == "stand-in" else import_module("nixl_cu13")
