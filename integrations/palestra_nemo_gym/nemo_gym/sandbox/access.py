"""A sandbox as it is passed on by its owner."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from nemo_gym.json_types import JsonObject


class DirectSandboxConnection(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["direct"] = "direct"
    provider_config_ref: str
    """A top-level block of the config."""
    descriptor: JsonObject
    """From `AsyncSandbox.serialize`."""


class SandboxAccess(BaseModel):
    model_config = ConfigDict(extra="forbid")

    connection: DirectSandboxConnection
    workdir: str
