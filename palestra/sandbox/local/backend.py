"""The backend `local`: bubblewrap on this machine, without root and without a daemon.

Nothing is kept on a disk: all that is written lies in memory, and goes with the sandbox's last process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import select
import signal
import socket
from typing import Any, Self

from palestra.sandbox import seccomp
from palestra.sandbox.commands import Command, CommandSandbox
from palestra.sandbox.endpoint_proxy import EndpointRelay
from palestra.sandbox.errors import SandboxEnded, SandboxError, SandboxUnavailable
from palestra.sandbox.local import bubblewrap, cgroup
from palestra.sandbox.local.helpers import HelperProcess, readable, start_helper
from palestra.sandbox.local.watchdog import MemoryWatchdog, WatchedSandbox
from palestra.sandbox.spec import HOME, OWN_FOLDERS, SEARCH_PATH, SandboxSpec
from palestra.util.processes import kill

START_S = 30.0
BYTES_PER_FILE = 4096
OPEN_FILES = 1024
MAX_DESCRIPTORS = 3
LAST_WORDS = 1 << 16

_watchdog = MemoryWatchdog()


class LocalSandbox(CommandSandbox):
    """A sandbox in namespaces of its own, behind a filter of system calls."""

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._bwrap: HelperProcess | None = None
        self._input: int | None = None
        """The other end of process 1's input: it ends when this is closed."""
        self._common: dict[str, Any] = {}
        self._watched: WatchedSandbox | None = None
        self._relay: EndpointRelay | None = None
        self._cgroup: cgroup.SandboxCgroup | None = None
        self._user = bubblewrap.unprivileged_user()

    @staticmethod
    def problem() -> str | None:
        return bubblewrap.problem()

    async def start(self) -> Self:
        if self._bwrap is not None:
            raise SandboxError("the sandbox was started before")
        if problem := await asyncio.to_thread(self.problem):
            raise SandboxUnavailable(problem)
        try:
            if (parent := cgroup.place()) is not None:
                self._cgroup = cgroup.SandboxCgroup.make(parent, self.spec.limits)
            self._common = self._common_order()
            found = await self._launch()
            self._watched = WatchedSandbox(found[1], found[0], self.spec.limits.memory_bytes)
            if self.spec.endpoint_proxy is not None:
                self._relay = await EndpointRelay(self.spec.endpoint_proxy).open(socket.socket(fileno=found[2]))
        except BaseException:  # cancelled, too: nothing may be left
            await self.stop()
            raise
        if self._cgroup is None:
            _watchdog.watch(self._watched)
        return self

    def _common_order(self) -> dict[str, Any]:
        program = seccomp.contained(has_cgroup=self._cgroup is not None)
        assert program is not None
        return {
            "user": self._user,
            "filter": program.hex(),
            "cores": self._cores(),
            "cgroup": str(self._cgroup.members) if self._cgroup else None,
        }

    def _cores(self) -> list[int]:
        """Returns the cores of a sandbox: without a cgroup it has whole ones, which it cannot leave."""
        cores, wanted = sorted(os.sched_getaffinity(0)), self.spec.limits.cpus
        if self._cgroup is not None and self._cgroup.limits_cpus:
            return cores
        if wanted != int(wanted):
            raise SandboxUnavailable(f"limits.cpus={wanted:g}: without a cgroup, a sandbox has whole cores only")
        return random.sample(cores, min(math.ceil(wanted), len(cores)))

    async def _launch(self) -> list[int]:
        """Returns the descriptors that the helper sends: process 1, /proc, and the endpoint proxy's socket."""
        spec = self.spec
        writable = [*dict.fromkeys((spec.workdir, *OWN_FOLDERS, *spec.writable))]
        order = {
            **self._common,
            "bwrap": bubblewrap.program(),
            "arguments": bubblewrap.arguments(spec, writable, has_cgroup=self._cgroup is not None),
            "texts": bubblewrap.texts(spec),
            "writable": writable,
            "disk_bytes": spec.limits.disk_bytes,
            "files": spec.limits.disk_bytes // BYTES_PER_FILE,
            "proxy_port": spec.endpoint_proxy.port if spec.endpoint_proxy else 0,
        }
        inside, self._input = os.pipe()
        output, errors = os.pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            try:
                self._bwrap, control = await start_helper("launch", order, (inside, nowhere, errors))
            finally:
                for one in (inside, nowhere, errors):
                    os.close(one)
            with control:
                try:
                    async with asyncio.timeout(START_S):
                        return await _descriptors(control)
                except (EOFError, ConnectionError, TimeoutError) as error:
                    own = str(error) if isinstance(error, EOFError) else ""
                    reason = own or await _last_output(self._bwrap, output) or "its helper took too long, or was killed"
                    raise SandboxUnavailable(f"the sandbox did not start: {reason}") from None
        finally:
            os.close(output)

    async def _begin(self, command: Command, streams: tuple[int, int, int]) -> HelperProcess:
        reason, watched = self._why_ended(), self._watched
        if reason or watched is None:
            raise SandboxEnded(reason)
        limits = self.spec.limits
        order = {
            **self._common,
            "arguments": command.arguments,
            "env": {"PATH": SEARCH_PATH, "HOME": HOME, "USER": "agent", "LANG": "C.UTF-8", **command.env},
            "cwd": command.cwd,
            "limits": {"NPROC": limits.processes, "NOFILE": OPEN_FILES, "CORE": 0},
        }
        process, control = await start_helper("enter", order, streams, watched.first)
        control.close()
        return process

    def _why_ended(self) -> str | None:
        if self._watched is None or self._watched.is_over:
            return "the sandbox is not started, or was stopped"
        ended = select.poll()
        ended.register(self._watched.first, select.POLLIN)
        return self._watched.why_ended or ("the sandbox has ended" if ended.poll(0) else None)

    async def stop(self) -> None:
        await asyncio.shield(asyncio.ensure_future(self._stop()))

    async def _stop(self) -> None:
        watched, self._watched = self._watched, None
        if self._relay is not None:
            await self._relay.close()
        if watched is not None:
            watched.forget()
            with contextlib.suppress(ProcessLookupError):  # it has ended before
                signal.pidfd_send_signal(watched.first, signal.SIGKILL)
            await readable(watched.first)  # the kernel ends process 1 after all others
            os.close(watched.first)
            os.close(watched.processes)
        if self._input is not None:
            os.close(self._input)
            self._input = None
        if self._bwrap is not None:
            await kill(self._bwrap)
        if self._cgroup is not None:
            self._cgroup.remove()


async def _descriptors(control: socket.socket) -> list[int]:
    """Receives the launcher's answer. Raises EOFError where it has none, with its reason if it gave one."""
    await readable(control.fileno())
    answer, found, _, _ = socket.recv_fds(control, 64 * 1024, MAX_DESCRIPTORS)
    if not found:
        raise EOFError(json.loads(answer)["error"] if answer else "")
    return list(found)


async def _last_output(process: HelperProcess, errors: int) -> str:
    """Reads what is in the pipe: processes that hold its other end have ended, or write no more."""
    await kill(process)
    os.set_blocking(errors, False)
    try:
        return os.read(errors, LAST_WORDS).decode(errors="replace").strip()
    except BlockingIOError:
        return ""
