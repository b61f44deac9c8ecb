"""How many examples a property is tried with: few every day, all of them in `make test-slow`."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

SHARE = 4
settings.register_profile("thorough", deadline=None)
settings.register_profile("everyday", deadline=None, max_examples=100 // SHARE)  # a busy machine is no failure


def examples(thorough: int, **options: Any) -> settings:
    """Settings for this many examples with the profile "thorough", and for a quarter of them with the everyday one."""
    is_thorough = settings.get_current_profile_name() == "thorough"
    return settings(max_examples=thorough if is_thorough else -(-thorough // SHARE), **options)
