"""The parts of a server that the dashboard uses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from palestra.server.broker.service import EpisodeService
from palestra.server.core.owners.owner_states import OwnerStates
from palestra.server.core.owners.quotas import OwnerQuotas
from palestra.server.core.owners.usage import UsageAccount
from palestra.server.core.shutdown import Shutdown
from palestra.server.core.task_replays import TaskReplays
from palestra.server.core.telemetry.activity import Activity
from palestra.server.http.auth import Authenticator
from palestra.server.model_api.service import ModelApi
from palestra.server.pages.server_state import ServerReader
from palestra.store import Store


@dataclass(frozen=True, slots=True)
class PageParts:
    runs: Path
    """The server's folder of runs."""
    gym: str
    secret: str
    store: Store
    authenticator: Authenticator
    key_uses: dict[int, float]
    model_api: ModelApi
    episodes: EpisodeService
    replays: TaskReplays
    server: ServerReader
    activity: Activity
    owners: OwnerStates
    quotas: OwnerQuotas
    usage: UsageAccount
    shutdown: Shutdown
