"""Starts a gym's processes on this machine, and shows and keeps their output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from palestra.config.redaction import redact
from palestra.gym.errors import ServerStartError
from palestra.gym.supervisor.plan import PlannedProcess
from palestra.placement.child import ChildProcess
from palestra.placement.process import Report, RunningProcess
from palestra.placement.reaper import OrphanReaper


def log_to(folder: Path, name: str, report: Callable[[str], None]) -> Callable[[str], None]:
    """Writes the output of a process to a file as well (`nemo_gym_log_dir`). A file that cannot be written is reported
    once, and its lines are lost: a process whose output is not read would block."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name.replace('/', '_')}.log"

    is_broken = False

    def written(line: str) -> None:
        nonlocal is_broken
        try:
            with file.open("a", encoding="utf-8", errors="replace") as out:
                out.write(f"{line}\n")
            is_broken = False
        except OSError as error:
            if not is_broken:
                report(f"{name}: cannot write {file} ({error.strerror}); until then, its output is only shown here")
            is_broken = True
        report(line)

    return written


class ProcessHost(Protocol):
    async def start(self, process: PlannedProcess, report: Report, on_line: Report) -> RunningProcess:
        """`report` gets notes for people, `on_line` what the process prints. Raises ServerStartError or NotPlaced."""
        ...


def with_process_name(name: str, on_line: Report) -> Report:
    """Puts the name of a process before what it prints."""
    return lambda line: on_line(f"({name}) {line}")


class ThisMachine:
    def __init__(self, reaper: OrphanReaper) -> None:
        self._reaper = reaper

    async def start(self, process: PlannedProcess, report: Report, on_line: Report) -> RunningProcess:
        command = await process.command(report)
        try:
            return await ChildProcess.start(
                process.name, command, self._reaper, with_process_name(process.name, on_line), clean=redact
            )
        except OSError as error:
            program = command.arguments[0]
            raise ServerStartError(f"{process.name}: cannot run {program} ({error.strerror})") from None
