"""Sandboxes in which a shell runs: files are read and written, and snapshots made, by commands inside.

Nothing inside is ever opened from outside, so that no link can lead out.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from palestra.sandbox.errors import SandboxEnded, SandboxError
from palestra.sandbox.spec import MIB, STDERR, STDOUT, ExecResult, OutputSink, SandboxSpec
from palestra.sandbox.streams import CommandStreams, ended_in_time
from palestra.util.atomic_files import replacing
from palestra.util.processes import GroupLeader, stop

PATIENCE_S = 2.0
READ_MAX = 64 * MIB
FILES_S = 600.0
PACK = """
set --
for one in .[!.]* ..?* *; do
    if [ -e "$one" ] || [ -L "$one" ]; then set -- "$@" "$one"; fi
done
if [ $# -eq 0 ]; then exec tar -c -T /dev/null; fi
exec tar -c -- "$@"
"""
"""Packs what is in a folder, without the folder itself, whose mode may not be changed by whom unpacks it."""
NO_FILE = 'echo "$1: not a regular file" >&2; exit 1;'
READ = f'if [ -e "$1" ] && [ ! -f "$1" ]; then {NO_FILE} fi; exec head -c "$2" -- "$1"'
WRITE = f'if [ -e "$1" ] && [ ! -f "$1" ]; then {NO_FILE} fi; mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
"""Reads and writes of files only: a pipe or a terminal would wait for a process inside."""
MARK = "PALESTRA_COMMAND"
"""The variable by which a command, and what it started, is found where its process is not ours."""
KILL_MARKED = """
for round in 1 2 3; do
    for one in /proc/[0-9]*; do
        if [ "$one" != "/proc/$$" ] && grep -q "$0" "$one/environ" 2>/dev/null; then kill -9 "${one#/proc/}"; fi
    done
done
"""
"""A script that ends what has the mark in its environment, which is the script's first argument."""
LATE = 124
"""The status of a command that was late, as of `timeout`."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command as a backend gets it."""

    arguments: list[str]
    env: dict[str, str]
    cwd: str
    limit_s: float
    max_output: int
    has_input: bool = False


class CommandSandbox(ABC):
    """A sandbox whose backend says how to start, to begin a command, and to stop."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec

    @abstractmethod
    async def start(self) -> Self: ...

    @abstractmethod
    async def stop(self) -> None: ...

    @abstractmethod
    async def _begin(self, command: Command, streams: tuple[int, int, int]) -> GroupLeader:
        """Starts a process that lives as long as the command inside and ends with its status. `streams` are its
        standard input, output and errors."""

    async def _end(self, process: GroupLeader) -> None:
        """Ends a process of `_begin` together with its command. As it stands here, SIGTERM does that."""
        await stop(process, PATIENCE_S)

    @abstractmethod
    def _why_ended(self) -> str | None:
        """Returns why the sandbox does not run any more; None: it does, as far as is known."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limit_s: float | None = None,
        max_output: int | None = None,
        on_output: OutputSink | None = None,
    ) -> ExecResult:
        limits = self.spec.limits
        arguments = ["/bin/sh", "-c", command] if isinstance(command, str) else [str(one) for one in command]
        return await self._run(
            Command(
                arguments,
                {**self.spec.env, **(env or {})},
                cwd or self.spec.workdir,
                limits.exec_s if limit_s is None else limit_s,
                limits.output_bytes if max_output is None else max_output,
                bool(stdin),
            ),
            stdin,
            {STDOUT: on_output, STDERR: on_output} if on_output else {},
        )

    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        most = READ_MAX if max_bytes is None else max_bytes
        read = ["/bin/sh", "-c", READ, "sh", path, str(most + 1)]
        done = await self.exec(read, limit_s=FILES_S, max_output=most)
        if done.is_truncated:
            raise SandboxError(f"{path} in the sandbox is longer than {most} bytes")
        return _checked(done, f"{path} in the sandbox cannot be read").stdout

    async def write(self, path: str, data: bytes) -> None:
        done = await self.exec(["/bin/sh", "-c", WRITE, "sh", path], stdin=data, limit_s=FILES_S)
        _checked(done, f"{path} in the sandbox cannot be written")

    async def snapshot(self, file: Path) -> None:
        with replacing(file) as stream:
            pack = ["/bin/sh", "-c", PACK]
            most = 2 * self.spec.limits.disk_bytes
            command = Command(pack, {}, self.spec.workdir, FILES_S, most)

            async def store(_: int, data: bytes) -> None:
                await asyncio.to_thread(stream.write, data)

            done = await self._run(command, b"", {STDOUT: store})
            _checked(done, "the working folder cannot be packed")
            if done.is_truncated:
                raise SandboxError("the working folder is larger than the sandbox's limit, as an archive")

    async def __aenter__(self) -> Self:
        try:
            await self.start()
            await self._fill()
        except BaseException:  # cancelled, too: nothing may be left
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _fill(self) -> None:
        """Puts in what the spec says is there at the beginning."""
        if self.spec.snapshot is not None:
            with self.spec.snapshot.open("rb") as archive:
                unpack = Command(["tar", "-x", "-o"], {}, self.spec.workdir, FILES_S, MIB, has_input=True)
                _checked(await self._run(unpack, archive), "the snapshot cannot be unpacked")
        for path, data in self.spec.files.items():
            await self.write(path, data)

    async def _run(
        self, command: Command, stdin: bytes | IO[bytes], sinks: Mapping[int, OutputSink] | None = None
    ) -> ExecResult:
        streams = CommandStreams(stdin, command.max_output, sinks or {})
        try:
            process = await self._begin(command, streams.inside)
        except BaseException:
            streams.connect()
            await streams.drain()
            await streams.close()
            raise
        streams.connect()
        try:
            is_late = await self._ended_late(process, command.limit_s)
            await streams.drain()
        finally:
            await streams.close()
        status = process.returncode or 0
        if not is_late and (status < 0 or self._why_ended()):
            message = streams.stderr.kept.decode(errors="replace").strip()
            raise SandboxEnded(self._why_ended() or message or f"the command's process outside was ended ({status})")
        return ExecResult(
            LATE if is_late else status,
            bytes(streams.stdout.kept),
            bytes(streams.stderr.kept),
            is_late,
            streams.is_truncated,
        )

    async def _ended_late(self, process: GroupLeader, limit_s: float) -> bool:
        """Waits for the end of a command; returns whether it took too long. It has ended, also when cancelled."""
        try:
            return not await ended_in_time(process, limit_s)
        finally:
            if process.returncode is None:
                await asyncio.shield(asyncio.ensure_future(self._end(process)))


def _checked(done: ExecResult, problem: str) -> ExecResult:
    if done.status:
        why = done.stderr.decode(errors="replace").strip().splitlines()
        raise SandboxError(f"{problem}: {'it took too long' if done.is_late else why[-1] if why else done.status}")
    return done
