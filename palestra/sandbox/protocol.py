"""The interface of every sandbox, whatever its backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

from palestra.sandbox.spec import ExecResult, OutputSink, SandboxSpec


class Sandbox(Protocol):
    """A place for untrusted programs. Used as `async with`, which starts and stops it."""

    spec: SandboxSpec
    """What it was made with."""

    def __init__(self, spec: SandboxSpec) -> None: ...

    @staticmethod
    def problem() -> str | None:
        """Returns why this kind of sandbox cannot run on this machine, in one line; None: it can."""
        ...

    async def start(self) -> Self:
        """Raises SandboxUnavailable where the backend cannot hold what it promises."""
        ...

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
        """Runs a command to its end: a line for the shell, or a program with its arguments. What it started in the
        background goes on. With `on_output`, output goes there as it comes, and the result has none. Raises
        SandboxEnded if the sandbox does not run; never because of the command."""
        ...

    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Returns a file's content. Raises SandboxError if it cannot be read, or is longer than `max_bytes`."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Writes a file, with the folders above it. Raises SandboxError if it cannot be written."""
        ...

    async def snapshot(self, file: Path) -> None:
        """Writes the working folder into a file outside, a tar archive, from which other sandboxes may start."""
        ...

    async def stop(self) -> None:
        """Ends everything in the sandbox and removes it. Calling it again does nothing."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...
