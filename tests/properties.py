"""How many examples a property is tried with: few every day, all of them in `make test-slow`."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

EVERYDAY, THOROUGH = "everyday", "thorough"
SHARE = 4

settings.register_profile(THOROUGH, deadline=None)  # a busy machine is no failure
settings.register_profile(EVERYDAY, deadline=None, max_examples=settings.get_profile(THOROUGH).max_examples // SHARE)


def examples(thorough: int, **options: Any) -> settings:
    """Settings for this many examples with the profile `thorough`, for a quarter of them every day."""
    is_thorough = settings.get_current_profile_name() == THOROUGH
    return settings(max_examples=thorough if is_thorough else -(-thorough // SHARE), **options)
