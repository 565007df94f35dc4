"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# how long an example takes says more about the machine than about the code
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A run says something about the change it tests only if it tries what the run before tried. New examples are looked
# for on purpose: `pytest --hypothesis-profile=search`.
settings.register_profile("same examples", settings.get_profile("any machine"), derandomize=True)
settings.register_profile("search", settings.get_profile("any machine"), max_examples=2000)
settings.load_profile("same examples")
