"""Records of a gym whose files are read: server instances by name, and the settings around them."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from palestra.util.json_types import JsonObject

ROW_INDEX = "_rowidx"
STEP_ID = "_ng_step_request_id"
ROLLOUT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""The form of a rollout's id: it becomes part of paths and file names."""


class ServerKind(StrEnum):
    """The kind as the files spell it, which is also the folder where implementations are searched."""

    MODEL = "responses_api_models"
    AGENT = "responses_api_agents"
    RESOURCES = "resources_servers"
    ENVIRONMENT = "environment_servers"
    """Stands before an agent, and is called in its place: NeMo Gym has them since 0.7."""


class Isolation(StrEnum):
    SHARED = "shared"
    """Shares a process with other servers; they call each other without HTTP."""
    PROCESS = "process"


class ServerInstance(Struct, frozen=True, kw_only=True):
    """One server of a gym."""

    name: str
    """The unique name, used by references, `agent_ref` and `NEMO_GYM_CONFIG_PATH`."""
    kind: ServerKind
    implementation: str
    settings: JsonObject
    """The innermost mapping, interpolated: entrypoint, references, and the implementation's settings."""
    host: str
    port: int
    isolation: Isolation = Isolation.SHARED
    folder: Path | None = None
    """The folder of its entrypoint. None: built in, by name."""
    is_stock: bool = False
    """Whether its code imports `nemo_gym`: then it runs in a process of its own, with the compatibility package on its
    path."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def where(self) -> str:
        """The path of its settings in the config."""
        return f"{self.name}.{self.kind}.{self.implementation}"


class GymConfig(Struct, frozen=True, kw_only=True):
    """A whole gym, ready to be started."""

    servers: dict[str, ServerInstance]
    settings: JsonObject
    """All settings of the files and the command line, interpolated, with hosts and ports filled in. Contains
    secrets."""
    head_host: str
    head_port: int
    secret: str
    """Signs session cookies; made for each start, and passed to every child."""

    def of_kind(self, kind: ServerKind) -> list[ServerInstance]:
        return [one for one in self.servers.values() if one.kind is kind]
