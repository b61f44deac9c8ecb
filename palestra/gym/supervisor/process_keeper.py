"""Keeps one process of a gym running: starts it, watches its health, restarts it.

Unlike the server's workers and vLLM's servers, which are awaited for ever, it is given up after a few failures in a
row: code or settings of a folder may be wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from palestra.gym.config import OurSettings, our_settings
from palestra.gym.errors import ServerStartError, WrongServerSettings
from palestra.gym.start import BAD_CODE, BAD_SETTINGS
from palestra.gym.supervisor.child import ProcessHost, log_to
from palestra.gym.supervisor.plan import PlannedProcess
from palestra.gym.supervisor.probes import NoAnswer, check_server
from palestra.placement.process import NotPlaced, RunningProcess
from palestra.util.backoff import Backoff

RESTARTS = Backoff(0.2, 30.0)
STABLE_S = 60.0  # after being healthy for so long, a failure counts as a new one
FIRST_RESTARTS = 2
STARTING_PROBE_S = 0.02
STARTING_TIMEOUT_S = 2.0


class ProcessState(StrEnum):
    STARTING = "starting"
    HEALTHY = "healthy"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """Why a process has to be restarted."""

    reason: str
    healthy_s: float
    code: int | None = None

    @property
    def is_final(self) -> bool:
        """Whether restarting it would not help."""
        return self.code in (BAD_SETTINGS, BAD_CODE)


class ProcessKeeper:
    def __init__(self, process: PlannedProcess, host: ProcessHost, report: Callable[[str], None]) -> None:
        self.process = process
        self.settings: OurSettings = our_settings(process.config.settings)
        self.state = ProcessState.STARTING
        self.restarts = 0
        self.started_at = time.time()
        self.child: RunningProcess | None = None
        self.is_ready = asyncio.Event()
        self._host = host
        self._report = report
        self._healthy_at: float | None = None
        self._was_healthy = False
        log_folder = process.config.settings.get("nemo_gym_log_dir")
        self._child_report = report if not log_folder else log_to(Path(log_folder), process.name, report)

    @property
    def name(self) -> str:
        return self.process.name

    async def keep(self) -> None:
        """Runs until cancelled; the process is gone then. Raises ServerStartError when it gives up."""
        failures = 0
        try:
            while True:
                ended = await self._live()
                failures = 0 if ended.healthy_s >= STABLE_S else failures + 1
                if ended.is_final or failures > self._patience:
                    raise self._given_up(ended, failures)
                delay_s = RESTARTS.after(failures)
                self._change(ProcessState.RESTARTING)
                self._report(f"{self.name}: {ended.reason}; starting it again in {delay_s:g} s")
                await asyncio.sleep(delay_s)
                self.restarts += 1
        finally:
            await self._stop()

    @property
    def _patience(self) -> int:
        """Returns the allowed number of restarts: few for a process that was never healthy."""
        most = self.settings.max_restarts
        return most if self._was_healthy else min(most, FIRST_RESTARTS)

    def _given_up(self, ended: ProcessEnded, failures: int) -> ServerStartError:
        self._change(ProcessState.FAILED)
        output = self.child.last_output if self.child is not None else ""
        tries = "" if ended.is_final else f" ({failures} times in a row)"
        kind = WrongServerSettings if ended.code == BAD_SETTINGS else ServerStartError
        return kind(f"{self.name}: {ended.reason}{tries}; its last output:\n{output or '(none)'}")

    async def _live(self) -> ProcessEnded:
        """Runs one child, from its start to its end or to the moment it counts as hung."""
        try:
            self.child = await self._host.start(self.process, self._report, self._child_report)
        except NotPlaced as error:
            return ProcessEnded(str(error), healthy_s=0.0)
        self.started_at = time.time()
        watching = asyncio.create_task(self._watch(), name=f"{self.name}-watch")
        ending = asyncio.create_task(self.child.wait(), name=f"{self.name}-wait")
        try:
            await asyncio.wait({watching, ending}, return_when=asyncio.FIRST_COMPLETED)
            healthy_s = 0.0 if self._healthy_at is None else time.monotonic() - self._healthy_at
            if not ending.done():
                reason = watching.result()
                await self.child.kill()
                return ProcessEnded(reason, healthy_s)
            code = ending.result()
            reason = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
            return ProcessEnded(reason, healthy_s, code)
        finally:
            watching.cancel()
            ending.cancel()

    async def _watch(self) -> str:
        """Returns why it counts as hung."""
        self._healthy_at = None
        settings = self.settings
        until = time.monotonic() + settings.ready_timeout_s
        while problem := await self._problem(min(STARTING_TIMEOUT_S, settings.probe_timeout_s)):
            if time.monotonic() > until:
                return f"not healthy {settings.ready_timeout_s:g} s after its start ({problem})"
            await asyncio.sleep(STARTING_PROBE_S)
        self._healthy_at = time.monotonic()
        self._was_healthy = True
        self._change(ProcessState.HEALTHY)
        if self.restarts:
            self._report(f"{self.name}: healthy again")
        self.is_ready.set()
        failed = 0
        while failed < settings.probe_failures:
            await asyncio.sleep(settings.probe_interval_s)
            problem = await self._problem(settings.probe_timeout_s)
            failed = failed + 1 if problem else 0
        return f"hung ({problem})"

    async def _problem(self, timeout_s: float) -> str | None:
        """Returns the problem of the first server that has one."""
        checks = (check_server(one.name, one.host, one.port, timeout_s) for one in self.process.servers)
        results = await asyncio.gather(*checks, return_exceptions=True)
        for server, result in zip(self.process.servers, results, strict=True):
            if isinstance(result, NoAnswer):
                return f"{server.name}: {result}"
            if isinstance(result, BaseException):
                raise result
        return None

    def _change(self, state: ProcessState) -> None:
        self.state = state
        if state is not ProcessState.HEALTHY:
            self.is_ready.clear()

    async def _stop(self) -> None:
        if self.child is not None and not self.child.has_ended:
            await self.child.stop(self.settings.stop_timeout_s)
        if self.state is not ProcessState.FAILED:
            self._change(ProcessState.STOPPED)
