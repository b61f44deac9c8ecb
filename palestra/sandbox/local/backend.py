"""The backend `local`: bubblewrap on this machine, without root and without a daemon.

Owns: the life of one sandbox, from its helpers to its end. Never touches: what runs in it. Nothing is kept on a disk:
all that is written lies in memory, and goes with the sandbox's last process.
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
from asyncio.subprocess import Process
from typing import Any, Self

from palestra.sandbox import lean_python, seccomp
from palestra.sandbox.commands import Command, CommandSandbox
from palestra.sandbox.door import DoorRelay
from palestra.sandbox.errors import SandboxEnded, SandboxError, SandboxUnavailable
from palestra.sandbox.local import bubblewrap, cgroup
from palestra.sandbox.local.launch import CONTROL
from palestra.sandbox.local.watchdog import MemoryWatchdog, WatchedSandbox
from palestra.sandbox.spec import SEARCH_PATH, SandboxSpec
from palestra.util.processes import DEVNULL, PIPE, Stream, kill, spawn

LAUNCH, ENTER = "palestra.sandbox.local.launch", "palestra.sandbox.local.enter"
PACKAGES = ("palestra.sandbox.local", "palestra.sandbox")
START_S = 30.0
BYTES_PER_FILE = 4096
OPEN_FILES = 1024
MAX_DESCRIPTORS = 3

_watchdog = MemoryWatchdog()


class LocalSandbox(CommandSandbox):
    """A sandbox in namespaces of its own, behind a filter of system calls."""

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._bwrap: Process | None = None
        self._common: dict[str, Any] = {}
        self._watched: WatchedSandbox | None = None
        self._relay: DoorRelay | None = None
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
            if self.spec.door is not None:
                self._relay = await DoorRelay(self.spec.door).open(socket.socket(fileno=found[2]))
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
        """Without a cgroup, a sandbox has whole cores, which it cannot leave."""
        cores, wanted = sorted(os.sched_getaffinity(0)), self.spec.limits.cpus
        if self._cgroup is not None and self._cgroup.limits_cpus:
            return cores
        if wanted != int(wanted):
            raise SandboxUnavailable(f"limits.cpus={wanted:g}: without a cgroup, a sandbox has whole cores only")
        return random.sample(cores, min(math.ceil(wanted), len(cores)))

    async def _launch(self) -> list[int]:
        """Returns the descriptors that the helper sends: process 1, /proc, and the door's socket."""
        spec = self.spec
        writable = [*dict.fromkeys((spec.workdir, bubblewrap.HOME, "/tmp", "/dev/shm", *spec.writable))]
        order = {
            **self._common,
            "bwrap": bubblewrap.program(),
            "arguments": bubblewrap.arguments(spec, writable, has_cgroup=self._cgroup is not None),
            "texts": bubblewrap.texts(spec),
            "writable": writable,
            "disk_bytes": spec.limits.disk_bytes,
            "files": spec.limits.disk_bytes // BYTES_PER_FILE,
            "door_port": spec.door.port if spec.door else 0,
        }
        self._bwrap, control = await _helper(LAUNCH, order, stdin=PIPE, stderr=PIPE)
        with control:
            try:
                async with asyncio.timeout(START_S):
                    return await _descriptors(control)
            except (EOFError, ConnectionError, TimeoutError) as error:
                own = str(error) if isinstance(error, EOFError) else ""
                reason = own or await _last_words(self._bwrap) or "its helper took too long, or was killed"
                raise SandboxUnavailable(f"the sandbox did not start: {reason}") from None

    async def _begin(self, command: Command, streams: tuple[int, int, int]) -> Process:
        reason, watched = self._why_ended(), self._watched
        if reason or watched is None:
            raise SandboxEnded(reason)
        limits = self.spec.limits
        first = os.dup(watched.first)
        order = {
            **self._common,
            "process": first,
            "arguments": command.arguments,
            "env": {"PATH": SEARCH_PATH, "HOME": bubblewrap.HOME, "USER": "agent", "LANG": "C.UTF-8", **command.env},
            "cwd": command.cwd,
            "limits": {"NPROC": limits.processes, "NOFILE": OPEN_FILES, "CORE": 0},
        }
        try:
            process, control = await _helper(ENTER, order, *streams, pass_fds=(first,))
            control.close()
        finally:
            os.close(first)
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
            await _readable(watched.first)  # the kernel ends process 1 after all others
            os.close(watched.first)
            os.close(watched.processes)
        if self._bwrap is not None:
            await kill(self._bwrap)
        if self._cgroup is not None:
            self._cgroup.remove()


async def _helper(
    module: str,
    order: dict[str, Any],
    stdin: Stream,
    stdout: Stream = DEVNULL,
    stderr: Stream = DEVNULL,
    pass_fds: tuple[int, ...] = (),
) -> tuple[Process, socket.socket]:
    """Starts a helper and sends it its order; returns it with our end of its control socket."""
    control, theirs = socket.socketpair()
    try:
        with theirs:
            process = await spawn(
                *lean_python.command_of(module, *PACKAGES),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env={CONTROL: str(theirs.fileno())},
                pass_fds=(theirs.fileno(), *pass_fds),
            )
        control.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_sendall(control, json.dumps(order).encode() + b"\n")
        except OSError:
            pass  # the helper is gone: whoever waits for it sees that
        except BaseException:
            await kill(process)
            raise
    except BaseException:
        control.close()
        raise
    return process, control


async def _descriptors(control: socket.socket) -> list[int]:
    """Receives the launcher's answer. Raises EOFError where it has none, with its reason if it gave one."""
    await _readable(control.fileno())
    answer, found, _, _ = socket.recv_fds(control, 64 * 1024, MAX_DESCRIPTORS)
    if not found:
        raise EOFError(json.loads(answer)["error"] if answer else "")
    return list(found)


async def _last_words(process: Process) -> str:
    await kill(process)
    assert process.stderr is not None
    return (await process.stderr.read()).decode(errors="replace").strip()


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    happened = loop.create_future()
    loop.add_reader(descriptor, lambda: happened.done() or happened.set_result(None))
    try:
        await happened
    finally:
        loop.remove_reader(descriptor)
