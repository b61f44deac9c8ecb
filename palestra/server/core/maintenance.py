"""Recurring work: writing heartbeats, deleting old results and runs, expiring sessions, reading quotas and keys.

Owns: when it runs. Never touches: how long things are kept, which the config says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog
from sqlalchemy import Connection

from palestra.config.serve import ServeConfig
from palestra.server.core.checkpoints.files import CheckpointFiles
from palestra.server.core.owners.key_watch import KeyWatch
from palestra.server.core.owners.quotas import OwnerQuotas
from palestra.server.core.owners.usage import UsageAccount
from palestra.server.core.samples.requests import SamplingRequests
from palestra.server.core.sessions import TinkerSession, TinkerSessions
from palestra.server.core.teardown import Teardown
from palestra.server.core.trace_archive import TraceArchive
from palestra.server.core.training.requests import TrainingRequests
from palestra.store import Store
from palestra.store.queries import keys as key_rows
from palestra.store.queries import models as model_rows
from palestra.store.queries import sessions as session_rows
from palestra.store.queries.purge import purge
from palestra.store.queries.traces import Purge, purge_traces

log = structlog.get_logger()

FLUSH_S = 15.0  # heartbeats, last request times and uses of keys reach the database this often
SWEEP_S = 60.0
WATCH_S = 2.0  # usage reaches the database, and changes of quotas and keys the server, this often

Loop = Callable[[], Coroutine[Any, Any, None]]
"""Work that goes on until it is cancelled."""


@asynccontextmanager
async def running(*loops: Loop) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(loop(), name=loop.__qualname__) for loop in loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


class LastUses:
    """When sessions, models and keys were used last, for the database."""

    def __init__(
        self, store: Store, sessions: TinkerSessions, training: TrainingRequests, keys: KeyWatch, usage: UsageAccount
    ):
        self._store, self._sessions, self._training, self._keys = store, sessions, training, keys
        self._usage = usage

    async def flush(self) -> None:
        """Writes to the database. An error is only logged, because it is tried again later."""
        heartbeats = self._sessions.take_dirty()
        uses = dict(self._keys.uses)
        requests = {m.model_id: m.last_request_at for m in self._training.models.values()}

        def write(c: Connection) -> None:
            session_rows.touch_sessions(c, heartbeats)
            model_rows.touch_models(c, requests)
            key_rows.touch_keys(c, uses)

        await _guarded(self._store.write(write))
        await _guarded(self._usage.flush())

    async def flush_often(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()


class OwnerWatch:
    """Usage on its way to the database; quotas and keys that commands beside the server have changed."""

    def __init__(
        self,
        usage: UsageAccount,
        quotas: OwnerQuotas,
        keys: KeyWatch,
        end_keys: Sequence[Callable[[set[int]], None]],
    ):
        """`end_keys` are called with the numbers of keys that were revoked or have expired."""
        self._usage, self._quotas, self._keys, self._end_keys = usage, quotas, keys, end_keys

    async def watch_often(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            await _guarded(self._usage.flush())
            await _guarded(self._quotas.read())
            await _guarded(self._read_keys())

    async def _read_keys(self) -> None:
        if ended := await self._keys.read():
            for end in self._end_keys:
                end(ended)


class Sweeper:
    """Deletes results, checkpoints, runs and traces that are over."""

    def __init__(
        self,
        config: ServeConfig,
        store: Store,
        training: TrainingRequests,
        sampling: SamplingRequests,
        checkpoints: CheckpointFiles,
    ):
        self._config, self._store, self._training, self._sampling = config, store, training, sampling
        self._checkpoints = checkpoints
        self._archive = None if config.archive is None else TraceArchive(store, config.archive)

    async def sweep_often(self) -> None:
        config = self._config
        while True:
            await asyncio.sleep(min(SWEEP_S, max(1.0, config.keep_results_s)))
            now = time.time()
            self._training.expire(now)
            self._sampling.expire(now)
            await _guarded(self._sweep_checkpoints())
            before = now - config.keep_runs_s
            await _guarded(self._store.write(lambda c, before=before: purge(c, before)))
            old = Purge(before=now - config.keep_traces_s, max_turns=config.limits.max_turns)
            if self._archive is None:
                await _guarded(self._store.write(lambda c, old=old: purge_traces(c, old)))
            else:
                await _guarded(self._archive.purge(old))

    async def _sweep_checkpoints(self) -> None:
        await self._checkpoints.sweep(self._training.folders_to_load() | self._sampling.folders_to_read())


class SessionExpiry:
    """Ends sessions whose clients are silent for too long."""

    def __init__(self, config: ServeConfig, store: Store, sessions: TinkerSessions, teardown: Teardown):
        self._config, self._store, self._sessions, self._teardown = config, store, sessions, teardown

    async def expire_often(self) -> None:
        while self._config.cleans_sessions:
            await asyncio.sleep(self._config.session_check_s)
            for session in self._sessions.stale(self._config.session_timeout_s):
                log.info("a session expired", session=session.session_id)
                await _guarded(self._expire(session))

    async def _expire(self, session: TinkerSession) -> None:
        await self._teardown.end_session(
            session,
            "the session expired: no heartbeat arrived for too long",
            lambda: self._store.write(lambda c: session_rows.expire_session(c, session.session_id)),
        )


async def _guarded(work: Awaitable[object]) -> None:
    try:
        await work
    except Exception:  # boundary: whatever it is, the next round may succeed
        log.exception("recurring work failed; trying again")
