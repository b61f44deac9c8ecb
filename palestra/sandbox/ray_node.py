"""The backend `ray`: a local sandbox on a node of a Ray cluster."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from palestra.sandbox.errors import SandboxEnded, SandboxError, SandboxUnavailable
from palestra.sandbox.local.backend import LocalSandbox
from palestra.sandbox.spec import ExecResult, OutputSink, SandboxSpec
from palestra.util.atomic_files import replacing


class NodeSandbox:
    """The actor on the node: it ends with its owner, and the sandbox with it."""

    def __init__(self, spec: SandboxSpec, snapshot: bytes | None) -> None:
        self._snapshot = snapshot
        self._spec = spec
        self._sandbox: LocalSandbox | None = None

    async def start(self) -> None:
        with tempfile.NamedTemporaryFile() as archive:
            archive.write(self._snapshot or b"")
            archive.flush()
            begin = Path(archive.name) if self._snapshot is not None else None
            self._sandbox = await LocalSandbox(replace(self._spec, snapshot=begin)).__aenter__()
        self._snapshot = None

    async def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        if self._sandbox is None:
            raise SandboxEnded("the sandbox is not started")
        return await getattr(self._sandbox, name)(*arguments, **options)

    async def stream(
        self, command: str | Sequence[str], **options: Any
    ) -> AsyncIterator[tuple[int, bytes] | ExecResult]:
        """Runs a command and yields its output as it comes, and its result in the end."""
        parts: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(maxsize=1)

        async def on_output(number: int, data: bytes) -> None:
            await parts.put((number, data))

        async def run() -> ExecResult:
            try:
                return await self.call("exec", command, on_output=on_output, **options)
            finally:
                await parts.put(None)

        running = asyncio.create_task(run(), name="sandbox command")
        try:
            while (part := await parts.get()) is not None:
                yield part
            yield await running
        finally:
            running.cancel()

    async def snapshot(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            await self.call("snapshot", Path(folder) / "snapshot")
            return (Path(folder) / "snapshot").read_bytes()


class RaySandbox:
    """A sandbox of the backend local on another node. Ray must be connected to (`ray.init`), or RAY_ADDRESS be set."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self._actor: Any = None

    @staticmethod
    def problem() -> str | None:
        if importlib.util.find_spec("ray") is None:
            return "ray is not installed (pip install 'palestra[ray]')"
        import ray  # pyright: ignore[reportMissingImports]

        if ray.is_initialized() or "RAY_ADDRESS" in os.environ:
            return None
        return "this process is not connected to a Ray cluster (ray.init, or RAY_ADDRESS)"

    async def start(self) -> Self:
        if problem := self.problem():
            raise SandboxUnavailable(problem)
        import ray  # pyright: ignore[reportMissingImports]

        where = {f"node:{self.spec.host}": 0.001} if self.spec.host else {}
        snapshot = await asyncio.to_thread(self.spec.snapshot.read_bytes) if self.spec.snapshot else None
        options = {"num_cpus": 0, "resources": where, "max_concurrency": 1000}
        self._actor = ray.remote(NodeSandbox).options(**options).remote(replace(self.spec, snapshot=None), snapshot)
        try:
            await self._answer(self._actor.start.remote())
        except BaseException:  # cancelled, too: nothing may be left
            await self.stop()
            raise
        return self

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
        options = {"stdin": stdin, "env": dict(env or {}), "cwd": cwd, "limit_s": limit_s, "max_output": max_output}
        if on_output is None:
            return await self._call("exec", command, **options)
        if self._actor is None:
            raise SandboxEnded("the sandbox is not started, or was stopped")
        async for reference in self._actor.stream.options(num_returns="streaming").remote(command, **options):
            part = await self._answer(reference)
            if isinstance(part, ExecResult):
                return part
            await on_output(*part)
        raise SandboxEnded("the sandbox's node has sent no result")

    async def read(self, path: str, *, max_bytes: int | None = None) -> bytes:
        return await self._call("read", path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        await self._call("write", path, data)

    async def snapshot(self, file: Path) -> None:
        if self._actor is None:
            raise SandboxEnded("the sandbox is not started, or was stopped")
        packed = await self._answer(self._actor.snapshot.remote())
        with replacing(file) as stream:
            stream.write(packed)

    async def stop(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            import ray  # pyright: ignore[reportMissingImports]

            try:
                await self._answer(actor.call.remote("stop"))
            except SandboxError:
                pass  # it has ended, or never began
            ray.kill(actor)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        if self._actor is None:
            raise SandboxEnded("the sandbox is not started, or was stopped")
        return await self._answer(self._actor.call.remote(name, *arguments, **options))

    async def _answer(self, reference: Any) -> Any:
        """Errors of the sandbox arrive as they were raised there; a lost actor is a sandbox that has ended."""
        from ray.exceptions import RayActorError, RayTaskError  # pyright: ignore[reportMissingImports]

        try:
            return await reference
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise SandboxEnded(f"the sandbox's node or actor is lost: {error}") from error
