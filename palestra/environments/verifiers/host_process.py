"""The process that hosts an entry's environments of verifiers, and calls to it."""

from __future__ import annotations

import asyncio
import itertools
import os
from asyncio.subprocess import Process
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec

from palestra.environments.errors import EnvironmentFailure
from palestra.environments.verifiers.settings import VerifiersSettings
from palestra.types.rollouts import VERIFIERS
from palestra.util import processes
from palestra.util.json_types import JsonObject
from palestra.util.log_files import last_output

HOST = Path(__file__).parent / "host" / "verifiers_host.py"
BIGGEST_LINE = 64 * 1024 * 1024
STOP_S = 10.0
TRAIN, EVAL = "train", "eval"
"""Parts: the environment with `args`, and the one with `eval_args`, if there are some."""


class HostLost(EnvironmentFailure):
    """The process has ended, or could not be started."""


class VerifiersHost:
    """Starts its process at the first call, and again at the next one after it has ended."""

    def __init__(self, name: str, settings: VerifiersSettings, log: Path) -> None:
        self._name, self._settings, self._log = name.removeprefix(VERIFIERS), settings, log
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count()
        self._starting = asyncio.Lock()
        """Protects the start: calls that come at the same time share one process."""
        self.is_grouped = False
        """Whether rewards are given to a whole group of rollouts."""

    async def call(self, method: str, **params: Any) -> Any:
        """Raises EnvironmentFailure with the error of the environment, and HostLost. A call that is cancelled is
        cancelled there, too."""
        await self.start()
        return await self._call(method, params)

    async def start(self) -> None:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._start()

    async def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # it ends by itself: environments have things to close
            await processes.stop(self._process, STOP_S)
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            try:
                self._process = await processes.spawn(
                    *(self._settings.python, str(HOST)),
                    stdin=processes.PIPE,
                    stdout=processes.PIPE,
                    stderr=log,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                    limit=BIGGEST_LINE,
                )
            except OSError as error:
                raise HostLost(f"{self._settings.python} cannot be started: {error}; see config.python") from None
        self._waiting = {}  # those of an earlier process are not answered by this one
        reading = self._read(self._process, self._waiting)
        self._reading = asyncio.create_task(reading, name=f"answers of verifiers:{self._name}")
        try:
            await self._load()
        except BaseException:
            await processes.kill(self._process)  # the next call tries again
            raise

    async def _load(self) -> None:
        settings = self._settings
        parts = {TRAIN: settings.args}
        if settings.eval_args is not None:
            parts[EVAL] = {**settings.args, **settings.eval_args}
        for part, args in parts.items():
            loaded = await self._call("load", {"name": self._name, "part": part, "args": args, "env": settings.env})
            self.is_grouped = loaded["is_grouped"]

    async def _call(self, method: str, params: JsonObject) -> Any:
        process, waiting, number = self._process, self._waiting, next(self._ids)
        assert process is not None
        future = waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(process, {"id": number, "method": method, "params": params})
            return await future
        except asyncio.CancelledError:
            with suppress(HostLost):
                self._send(process, {"id": -1, "method": "cancel", "params": {"id": number}})
            raise
        finally:
            del waiting[number]

    def _send(self, process: Process, request: JsonObject) -> None:
        if process.returncode is not None:
            raise HostLost(self._last_output())
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(request) + b"\n")

    async def _read(self, process: Process, waiting: dict[int, asyncio.Future[Any]]) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            answer = msgspec.json.decode(line)
            future = waiting.get(answer["id"])
            if future is None or future.done():
                continue
            if (error := answer.get("error")) is not None:
                future.set_exception(EnvironmentFailure(f"{error['type']}: {error['message']}"))
            else:
                future.set_result(answer["result"])
        await process.wait()
        for future in waiting.values():
            if not future.done():
                future.set_exception(HostLost(self._last_output()))

    def _last_output(self) -> str:
        return f"the process of verifiers:{self._name} has ended: {last_output(self._log)} (its log: {self._log})"
