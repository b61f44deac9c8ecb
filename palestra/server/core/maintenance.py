"""Recurring work: writing heartbeats, deleting old results and runs, expiring sessions, reading metrics.

Owns: when it runs. Never touches: how long things are kept, which the config says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import structlog
from sqlalchemy import Connection

from palestra.server.core.core import Core
from palestra.server.core.sessions import TinkerSession
from palestra.server.core.teardown import end_session
from palestra.server.core.telemetry.activity import EVERY_S
from palestra.store.queries import keys as key_rows
from palestra.store.queries import models as model_rows
from palestra.store.queries import sessions as session_rows
from palestra.store.queries.purge import purge
from palestra.store.queries.traces import Purge, purge_traces

log = structlog.get_logger()

FLUSH_S = 15.0  # heartbeats, last request times and uses of keys reach the database this often
SWEEP_S = 60.0
WATCH_S = 2.0  # usage reaches the database, and changes of quotas and keys the server, this often


class Maintenance:
    def __init__(self, core: Core):
        self._core = core

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        works = (self._flush_often, self._sweep_often, self._expire_often, self._record_often, self._watch_often)
        tasks = [asyncio.create_task(work(), name=work.__name__) for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    async def flush(self) -> None:
        """Writes to the database. An error is only logged, because it is tried again later."""
        heartbeats = self._core.sessions.take_dirty()
        uses = dict(self._core.key_uses)
        requests = {m.model_id: m.last_request_at for m in self._core.training.models.values()}

        def write(c: Connection) -> None:
            session_rows.touch_sessions(c, heartbeats)
            model_rows.touch_models(c, requests)
            key_rows.touch_keys(c, uses)

        await _guarded(self._core.store.write(write))
        await _guarded(self._core.usage.flush())

    async def _watch_often(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            await _guarded(self._core.usage.flush())
            await _guarded(self._core.quotas.read())
            await _guarded(self._core.keys.read())

    async def _flush_often(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def _record_often(self) -> None:
        while True:
            self._core.activity.record(self._core.queues())
            await asyncio.sleep(EVERY_S)

    async def _sweep_often(self) -> None:
        core, config = self._core, self._core.config
        while True:
            await asyncio.sleep(min(SWEEP_S, max(1.0, config.keep_results_s)))
            now = time.time()
            core.training.expire(now)
            core.sampling.expire(now)
            await _guarded(self._sweep_checkpoints())
            before = now - config.keep_runs_s
            await _guarded(core.store.write(lambda c, before=before: purge(c, before)))
            old = Purge(before=now - config.keep_traces_s, max_turns=config.limits.max_turns)
            if core.archive is None:
                await _guarded(core.store.write(lambda c, old=old: purge_traces(c, old)))
            else:
                await _guarded(core.archive.purge(old))

    async def _sweep_checkpoints(self) -> None:
        core = self._core
        await core.checkpoints.sweep(core.training.folders_to_load() | core.sampling.folders_to_read())

    async def _expire_often(self) -> None:
        config = self._core.config
        while config.cleans_sessions:
            await asyncio.sleep(config.session_check_s)
            for session in self._core.sessions.stale(config.session_timeout_s):
                log.info("a session expired", session=session.session_id)
                await _guarded(self._expire(session))

    async def _expire(self, session: TinkerSession) -> None:
        await end_session(
            self._core,
            session,
            "the session expired: no heartbeat arrived for too long",
            lambda: self._core.store.write(lambda c: session_rows.expire_session(c, session.session_id)),
        )


async def _guarded(work: Awaitable[object]) -> None:
    try:
        await work
    except Exception:  # boundary: whatever it is, the next round may succeed
        log.exception("recurring work failed; trying again")
