"""Whether the server can do all that it is asked for, and if not, why.

Owns: putting it together. Never touches: engines, disks.
"""

from __future__ import annotations

from dataclasses import dataclass

from palestra.server.core.shutdown import Shutdown
from palestra.server.core.telemetry.disk_health import DiskHealth
from palestra.server.core.telemetry.engine_states import EngineStates
from palestra.store import Store


@dataclass(frozen=True, slots=True)
class ReadyState:
    waiting_for: list[str]
    """Base models that cannot be used fully now."""
    reasons: list[str]
    """Why the server is not ready; empty: it is."""


class Readiness:
    def __init__(self, store: Store, engines: EngineStates, disks: DiskHealth, shutdown: Shutdown):
        self._store, self._engines, self._disks, self._shutdown = store, engines, disks, shutdown

    async def read(self) -> ReadyState:
        away = self._engines.troubles()
        reasons = [f"{name}: {why}" for name, why in away.items()] + await self._disks.troubles()
        if why := await self._store.trouble():
            reasons.append(why)
        if self._shutdown.has_begun:
            reasons.append("the server is being stopped")
        return ReadyState(list(away), reasons)
