"""How many examples a property is tried on: hypothesis' profiles, and the limit of a property whose examples are dear.

``fast`` is what `make test` takes: few examples, the same in each run. ``thorough`` (`make test-all`) takes more, and
``explore`` (a nightly run) draws others each time. `pytest --hypothesis-profile=NAME` chooses one.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

# Examples and what draws them take as long as the machine is busy.
ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
PROFILES = {
    "fast": settings(ANY_MACHINE, max_examples=25, derandomize=True),
    "thorough": settings(ANY_MACHINE, max_examples=200, derandomize=True),
    "explore": settings(ANY_MACHINE, max_examples=400),
}


def register_profiles() -> None:
    """Make the profiles known, and take `fast` unless pytest's option says otherwise."""
    for name, profile in PROFILES.items():
        settings.register_profile(name, profile)
    settings.load_profile("fast")


def examples(most: int, *unchecked: HealthCheck, **more: Any) -> settings:
    """Return the settings of a property that takes at most so many examples, or as many as the profile if fewer.

    Args:
        unchecked: health checks that do not apply to the property.
    """
    left_out = [HealthCheck.too_slow, *unchecked]
    return settings(max_examples=min(most, settings().max_examples), suppress_health_check=left_out, **more)
