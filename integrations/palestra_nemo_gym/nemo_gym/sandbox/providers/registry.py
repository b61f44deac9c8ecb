"""The registry of providers: Palestra's, those that were registered, and those that installed packages publish."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from nemo_gym.json_types import JsonMapping
from nemo_gym.sandbox.providers.base import SandboxProvider

ENTRY_POINT_GROUP = "nemo_gym.sandbox_providers"
OURS = "palestra"
_registered: dict[str, type[Any]] = {}


def register_provider(name: str, provider_class: type[Any], *, override: bool = False) -> None:
    if not name or (name in _registered and not override):
        raise ValueError(f"sandbox provider {name!r}: should have a name that is not yet registered")
    _registered[name] = provider_class


def list_providers() -> list[str]:
    return sorted({OURS, *_registered, *(one.name for one in entry_points(group=ENTRY_POINT_GROUP))})


def get_provider_class(name: str) -> type[Any]:
    if name in _registered:
        return _registered[name]
    if name == OURS:
        return _our_class()
    found = next((one for one in entry_points(group=ENTRY_POINT_GROUP) if one.name == name), None)
    if found is None:
        raise ValueError(
            f"there is no sandbox provider {name!r} here; there are: {', '.join(list_providers())}. "
            f"Palestra's own is `{OURS}: {{backend: local}}`, or docker, podman, ssh, ray; others come with packages "
            f"that publish an entry point of {ENTRY_POINT_GROUP}, or by nemo_gym.sandbox.register_provider"
        )
    return found.load()


def _our_class() -> type[Any]:
    try:
        from nemo_gym.sandbox.providers.palestra import PalestraSandboxProvider
    except ModuleNotFoundError as error:
        raise ValueError(
            f"sandbox provider {OURS!r} needs palestra in the server's own environment: {error}"
        ) from error
    return PalestraSandboxProvider


def create_provider(config: JsonMapping) -> SandboxProvider:
    """From `{name: settings}`."""
    if len(config) != 1:
        raise ValueError(f"should have exactly one sandbox provider, has {list(config)}")
    name, settings = next(iter(config.items()))
    return get_provider_class(name)(**dict(settings or {}))
