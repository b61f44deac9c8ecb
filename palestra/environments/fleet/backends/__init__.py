"""Backends: the places where instances run. Each is imported when it is used: some need packages of their own. Begin at
`embedded`."""

from __future__ import annotations

import importlib

from palestra.environments.fleet.backend import FleetBackend
from palestra.environments.fleet.records import FleetTask
from palestra.environments.fleet.settings import AUTO, FLEET, MCP, OPENENV, PLATFORM, REMOTE, FleetSettings
from palestra.environments.platform import APPS

__all__ = ["kind_of", "make_backend"]

KINDS = {
    PLATFORM: "palestra.environments.fleet.backends.embedded:EmbeddedBackend",
    FLEET: "palestra.environments.fleet.backends.hosted:HostedBackend",
    REMOTE: "palestra.environments.fleet.backends.remote:RemoteBackend",
    MCP: "palestra.environments.fleet.backends.mcp_server:McpBackend",
    OPENENV: "palestra.environments.fleet.backends.openenv:OpenEnvBackend",
}


def kind_of(task: FleetTask, settings: FleetSettings) -> str:
    if settings.backend != AUTO:
        return settings.backend
    return PLATFORM if task.env_key in APPS else FLEET


def make_backend(task: FleetTask, settings: FleetSettings) -> FleetBackend:
    """Makes the backend of a task. Raises ValueError."""
    kind = kind_of(task, settings)
    path = KINDS.get(kind, kind)
    module, _, name = path.partition(":")
    if not name:
        raise ValueError(f"there is no backend {kind!r}; there are {', '.join(KINDS)}, or package.module:factory")
    return getattr(importlib.import_module(module), name)(task, settings)
