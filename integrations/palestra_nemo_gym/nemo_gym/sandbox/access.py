"""A sandbox that somebody else owns, as it is passed on."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class DirectSandboxConnection(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["direct"] = "direct"
    provider_config_ref: str
    """A top-level block of the config."""
    descriptor: dict[str, Any]
    """From `AsyncSandbox.serialize`."""


class SandboxAccess(BaseModel):
    model_config = ConfigDict(extra="forbid")

    connection: DirectSandboxConnection
    workdir: str
