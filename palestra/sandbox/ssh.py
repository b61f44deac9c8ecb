"""The backend `ssh`: commands on another machine, as a user of it. It has no wall of its own.

Time and output are limited; memory, files, processes and the network are not.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import uuid
from asyncio.subprocess import Process
from typing import Self

from palestra.sandbox.commands import KILL_MARKED, MARK, PATIENCE_S, Command, CommandSandbox
from palestra.sandbox.errors import SandboxEnded, SandboxError, SandboxUnavailable
from palestra.sandbox.owned_folders import OwnedFolder
from palestra.sandbox.spec import SandboxSpec
from palestra.util.processes import PIPE, GroupLeader, kill, spawn, stop

START_S = 30.0
OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ExitOnForwardFailure=yes")
FIRST_PROCESS = f"""
folder=$(mktemp -d) && mkdir "$folder/work" "$folder/home" && echo "$folder" && cat >/dev/null
sh -c {shlex.quote(KILL_MARKED)} "{MARK}=$folder"
rm -rf "$folder"
"""
"""Lives as long as the connection, and then removes what there was."""


class SshSandbox(CommandSandbox):
    """A new folder on another machine, for commands that one would run there oneself."""

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        self._connection: Process | None = None
        self._control: OwnedFolder | None = None
        self._folder = ""
        self._marks: dict[int, str] = {}

    @staticmethod
    def problem() -> str | None:
        return None if shutil.which("ssh") else "ssh is not installed"

    async def start(self) -> Self:
        if self._connection is not None:
            raise SandboxError("the sandbox was started before")
        if self.spec.host is None or self.spec.host.startswith("-"):
            raise SandboxError("a sandbox of ssh needs a machine: SandboxSpec(host='user@name')")
        if problem := self.problem():
            raise SandboxUnavailable(problem)
        try:
            self._control = OwnedFolder()
            proxy = self.spec.endpoint_proxy
            forward = ["-R", f"127.0.0.1:{proxy.port}:{proxy.address[0]}:{proxy.address[1]}"] if proxy else []
            arguments = ["ssh", "-M", *self._options(), *forward, self.spec.host, FIRST_PROCESS]
            self._connection = await spawn(*arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE)
            self._folder = await self._first_line(self._connection)
        except BaseException:  # cancelled, too: nothing may be left
            await self.stop()
            raise
        return self

    def _options(self) -> list[str]:
        assert self._control is not None
        return [*OPTIONS, "-S", str(self._control.path / "ssh")]

    async def _first_line(self, connection: Process) -> str:
        assert connection.stdout is not None
        assert connection.stderr is not None
        try:
            async with asyncio.timeout(START_S):
                line = (await connection.stdout.readline()).decode().strip()
        except TimeoutError:
            line = ""
        if not line:
            await kill(connection)
            errors = (await connection.stderr.read()).decode(errors="replace").strip().splitlines()
            raise SandboxUnavailable(f"{self.spec.host} cannot be used: {errors[-1] if errors else 'it took too long'}")
        return line

    async def _begin(self, command: Command, streams: tuple[int, int, int]) -> Process:
        if reason := self._why_ended():
            raise SandboxEnded(reason)
        mark = f"{MARK}={self._folder}/{uuid.uuid4().hex}"
        script = f"{self._folder}/{uuid.uuid4().hex}"
        await self._write_script(script, command, mark)
        process = await spawn(
            *("ssh", *self._options(), str(self.spec.host), f"exec /bin/sh {script}"),
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
        )
        self._marks[process.pid] = mark
        return process

    async def _write_script(self, path: str, command: Command, mark: str) -> None:
        """Passes it in a file that only the user can read: every user there can read a command line."""
        folder = f"{self._folder}/work" if command.cwd == self.spec.workdir else command.cwd
        env = {"HOME": f"{self._folder}/home", **command.env}
        lines = [f"rm -f {path}", f"export {shlex.quote(mark)}"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
        lines += [f"cd {shlex.quote(folder)} || exit 126", f"exec {shlex.join(command.arguments)}"]
        writing = await self._ssh(f"umask 077; cat > {path}", "\n".join(lines).encode())
        if writing:
            raise SandboxEnded(f"the connection to {self.spec.host} is lost")

    async def _ssh(self, line: str, data: bytes = b"") -> int:
        process = await spawn("ssh", *self._options(), str(self.spec.host), line, stdin=PIPE)
        await process.communicate(data)
        return process.returncode or 0

    async def _end(self, process: GroupLeader) -> None:
        """The client's end would leave the command running: it is killed there, with all that has its mark."""
        mark = self._marks.pop(process.pid)
        await self._ssh(shlex.join(["/bin/sh", "-c", KILL_MARKED, mark]))
        await stop(process, PATIENCE_S)

    def _why_ended(self) -> str | None:
        if self._connection is None or self._control is None:
            return "the sandbox is not started, or was stopped"
        return None if self._connection.returncode is None else f"the connection to {self.spec.host} is lost"

    async def stop(self) -> None:
        await asyncio.shield(asyncio.ensure_future(self._stop()))

    async def _stop(self) -> None:
        connection, control, self._control = self._connection, self._control, None
        if connection is not None:
            assert connection.stdin is not None
            connection.stdin.close()
            try:
                async with asyncio.timeout(START_S):  # it removes its folder first
                    await connection.wait()
            except TimeoutError:
                await kill(connection)
        if control is not None:
            control.remove()
