"""The backends by name: ours, and those that installed packages publish."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from palestra.sandbox.errors import SandboxError
from palestra.sandbox.protocol import Sandbox
from palestra.sandbox.spec import SandboxSpec
from palestra.util.suggest import did_you_mean

ENTRY_POINTS = "palestra.sandboxes"
BUILT_IN = {
    "local": "palestra.sandbox.local.backend:LocalSandbox",
    "docker": "palestra.sandbox.container:DockerSandbox",
    "podman": "palestra.sandbox.container:PodmanSandbox",
    "ssh": "palestra.sandbox.ssh:SshSandbox",
    "ray": "palestra.sandbox.ray_node:RaySandbox",
}


def backend_names() -> list[str]:
    """Returns the names of all backends, ours first."""
    return [*BUILT_IN, *sorted(one.name for one in entry_points(group=ENTRY_POINTS) if one.name not in BUILT_IN)]


def backend(name: str) -> type[Sandbox]:
    """Returns the class of a backend. Raises SandboxError if there is none of that name, or it cannot be loaded."""
    try:
        if name in BUILT_IN:
            module, _, attribute = BUILT_IN[name].partition(":")
            return getattr(importlib.import_module(module), attribute)
        for one in entry_points(group=ENTRY_POINTS):
            if one.name == name:
                return one.load()
    except (ImportError, AttributeError) as error:
        raise SandboxError(f"the sandbox backend {name!r} cannot be loaded: {error}") from error
    raise SandboxError(
        f"there is no sandbox backend {name!r}; {did_you_mean(name, backend_names())}\n"
        f"  others come with packages that publish an entry point of {ENTRY_POINTS}"
    )


def sandbox(name: str = "local", spec: SandboxSpec | None = None) -> Sandbox:
    """Returns a sandbox of the named backend, to be used as `async with`."""
    return backend(name)(spec or SandboxSpec())
