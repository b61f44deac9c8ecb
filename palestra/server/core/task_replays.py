"""Replays of tasks for readers of their pages: `palestra eval` in a child process.

The processes end with the server. Each has a key of its own while it runs, if the caller has one: the first key of all
would close a server that is open to all clients. The result is a run folder like any other evaluation's.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from sqlalchemy import Connection

from palestra.server.core.background import Background
from palestra.server.core.errors import Refusal
from palestra.server.core.owners.callers import Caller
from palestra.store import Store
from palestra.store.queries.keys import create_key, list_keys, revoke_key
from palestra.store.records import Rights
from palestra.util import processes
from palestra.util.log_files import last_error, last_output, open_log

KEY_NAME = "a task played again "
KEY_VARIABLE = "OPENAI_API_KEY"
MAX_AT_ONCE = 2
LOOK_S = 0.1
STOP_S = 10.0


class TaskReplays:
    def __init__(self, store: Store):
        self._store = store
        self._playing: set[Process] = set()
        self._watching = Background()
        self._lock = asyncio.Lock()
        """Protects the count of what is played: one starts at a time."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self._store.write(_revoke_leftovers)
        try:
            yield
        finally:
            await asyncio.gather(*(processes.stop(one, STOP_S) for one in self._playing))
            await self._watching.settle_down()

    async def start(self, caller: Caller, command: Sequence[str], runs: Path, server: str | None) -> str:
        """Starts `palestra eval` with these arguments and waits until its folder is there. Returns the folder's name.
        `server` is this server's own address, if it has the model. Raises Refusal if it cannot begin."""
        async with self._lock:
            if len(self._playing) >= MAX_AT_ONCE:
                raise Refusal(503, f"{MAX_AT_ONCE} tasks are being played again; wait until one has ended")
            name = f"again-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
            key = await self._make_key(caller, name) if server is not None and caller.key is not None else None
            arguments = [*command, "--name", name, *(["--server", server] if server is not None else [])]
            process = await _spawned(arguments, log_file := runs / name / "logs" / "eval.log", key)
            self._playing.add(process)
            self._watching.run(self._watch(process, key and f"{KEY_NAME}{name}"))
        while process.returncode is None and not (runs / name / "config.json").is_file():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        if (runs / name / "config.json").is_file():
            return name
        why = last_error(log_file) or last_output(log_file)
        shutil.rmtree(runs / name)
        raise Refusal(422, f"the task cannot be played again: {why}")

    async def _make_key(self, caller: Caller, name: str) -> str:
        """A key of the caller's owner. Where there are no keys none is made: from the first on, every client needs
        one."""
        made = await self._store.write(
            lambda conn: create_key(
                conn, name=f"{KEY_NAME}{name}", owner=caller.owner, rights=Rights.TRAINER, now=time.time()
            )
        )
        return made.text

    async def _watch(self, process: Process, key_name: str | None) -> None:
        try:
            await process.wait()
        finally:
            self._playing.discard(process)
            if key_name is not None:
                await self._store.write(lambda conn: revoke_key(conn, key_name, now=time.time()))


async def _spawned(arguments: Sequence[str], log_file: Path, key: str | None) -> Process:
    """The key goes by the environment, because every user can read command lines."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    environment.pop(KEY_VARIABLE, None)
    if key is not None:
        environment[KEY_VARIABLE] = key
    log = await asyncio.to_thread(open_log, log_file)
    with log:
        command = (sys.executable, "-m", "palestra.cli", "eval", *arguments)
        return await processes.spawn(*command, stdout=log, stderr=log, env=environment)


def _revoke_leftovers(conn: Connection) -> None:
    """Revokes keys that a killed server left."""
    for key in list_keys(conn):
        if key.name.startswith(KEY_NAME):
            revoke_key(conn, key.key_id, now=time.time())
