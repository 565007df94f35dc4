"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# how long an example takes says more about the machine than about the code
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
