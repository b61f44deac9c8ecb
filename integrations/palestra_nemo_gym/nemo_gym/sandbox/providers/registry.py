"""Which providers there are: those that were registered, and those that installed packages publish.

Owns: finding one by its name. Never touches: sandboxes.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from nemo_gym.json_types import JsonMapping
from nemo_gym.sandbox.providers.base import SandboxProvider

ENTRY_POINT_GROUP = "nemo_gym.sandbox_providers"
_registered: dict[str, type[Any]] = {}


def register_provider(name: str, provider_class: type[Any], *, override: bool = False) -> None:
    if not name or (name in _registered and not override):
        raise ValueError(f"sandbox provider {name!r}: should have a name that is not yet registered")
    _registered[name] = provider_class


def list_providers() -> list[str]:
    return sorted({*_registered, *(one.name for one in entry_points(group=ENTRY_POINT_GROUP))})


def get_provider_class(name: str) -> type[Any]:
    if name in _registered:
        return _registered[name]
    found = next((one for one in entry_points(group=ENTRY_POINT_GROUP) if one.name == name), None)
    if found is None:
        raise ValueError(
            f"there is no sandbox provider {name!r} here; there are: {', '.join(list_providers()) or 'none'}. "
            "Palestra's stand-in for NeMo Gym has none of its own: install a package that publishes one as an entry "
            f"point of {ENTRY_POINT_GROUP}, or call nemo_gym.sandbox.register_provider"
        )
    return found.load()


def create_provider(config: JsonMapping) -> SandboxProvider:
    """From `{name: settings}`."""
    if len(config) != 1:
        raise ValueError(f"should have exactly one sandbox provider, has {list(config)}")
    name, settings = next(iter(config.items()))
    return get_provider_class(name)(**dict(settings or {}))
