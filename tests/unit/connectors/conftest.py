from __future__ import annotations

from typing import Any

import pytest
from kv_transports import StandIn, needs_nixl

from ostinato.connectors.nixl import choose_nixl


@pytest.fixture(params=["tcp", "stand-in", pytest.param("nixl", marks=needs_nixl)])
def nixl(request: pytest.FixtureRequest) -> Any | None:
    """None for TCP."""
    if request.param == "tcp":
        return None
    return StandIn() if request.param == "stand-in" else choose_nixl("nixl")
