"""A sandbox, for code that awaits and for code that does not."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import TimeoutError as TooLate
from pathlib import Path
from typing import Any, Self, TypeVar

from nemo_gym.json_types import JsonMapping, JsonObject
from nemo_gym.sandbox.providers import (
    ConnectableProvider,
    SandboxEndpoint,
    SandboxExecResult,
    SandboxHandle,
    SandboxProvider,
    SandboxSpec,
    SandboxStatus,
    SupportsSandboxEndpoint,
    create_provider,
)

Result = TypeVar("Result")
LIMIT_S = 3600.0  # of one operation of the blocking kind
EXEC_S = 180.0


class AsyncSandbox:
    """Started once, stopped once."""

    def __init__(self, provider: JsonMapping | SandboxProvider, spec: SandboxSpec | None = None) -> None:
        self._provider = create_provider(provider) if isinstance(provider, Mapping) else provider
        self._spec = spec
        self._handle: SandboxHandle | None = None
        self._is_stopped = False

    async def start(self, spec: SandboxSpec | None = None) -> Self:
        chosen = spec or self._spec
        if chosen is None:
            raise ValueError("a sandbox is started with a SandboxSpec")
        if self._handle is not None or self._is_stopped:
            raise RuntimeError("the sandbox is already started, or was stopped")
        self._handle, self._spec = await self._provider.create(chosen), chosen
        try:
            await self._upload_texts(chosen.files)
        except BaseException:  # cancelled, too: it must not be left running
            await self.stop()
            raise
        return self

    async def start_with_setup(
        self, spec: SandboxSpec | None, setup: Callable[[AsyncSandbox], Awaitable[None]]
    ) -> AsyncSandbox:
        """Stopped again where the setup fails."""
        await self.start(spec)
        try:
            await setup(self)
        except BaseException:  # cancelled, too: it must not be left running
            await self.stop()
            raise
        return self

    async def serialize(self, *, scope: str | None = None) -> JsonObject:
        """For `connect`, in this or another process."""
        found = await _connectable(self._provider).serialize_handle(self._started(), scope=scope)
        spec = self._spec or SandboxSpec()
        return {"workdir": spec.workdir, **found, **({"ports": list(spec.ports)} if spec.ports else {})}

    @classmethod
    async def connect(cls, descriptor: JsonMapping, *, provider: SandboxProvider) -> AsyncSandbox:
        spec = SandboxSpec(workdir=descriptor.get("workdir"), ports=tuple(descriptor.get("ports") or ()))
        made = cls(provider, spec)
        made._handle = await _connectable(provider).connect(descriptor)
        return made

    async def endpoint(self, port: int) -> SandboxEndpoint:
        """The address of a service at one of the ports that the spec names."""
        if self._spec is None or port not in self._spec.ports:
            raise ValueError(f"port {port} is not one of the sandbox's: SandboxSpec(ports=…)")
        if not isinstance(self._provider, SupportsSandboxEndpoint):
            raise NotImplementedError(f"sandbox provider {self._provider.name!r} knows no services")
        return await self._provider.endpoint(self._started(), port)

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = EXEC_S,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        folder = cwd if cwd is not None or self._spec is None else self._spec.workdir
        return await self._provider.exec(self._started(), command, cwd=folder, env=env, timeout_s=timeout_s, user=user)

    async def upload(self, local_path: Path | str, remote_path: str) -> None:
        await self._provider.upload_file(self._started(), Path(local_path), remote_path)

    async def download(self, remote_path: str, local_path: Path | str) -> None:
        await self._provider.download_file(self._started(), remote_path, Path(local_path))

    async def status(self) -> SandboxStatus:
        if self._handle is None:
            return SandboxStatus.UNKNOWN
        return SandboxStatus.STOPPED if self._is_stopped else await self._provider.status(self._handle)

    async def stop(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        try:
            if self._handle is not None:
                await self._provider.close(self._handle)
        finally:
            await self._provider.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _started(self) -> SandboxHandle:
        if self._handle is None or self._is_stopped:
            raise RuntimeError("Sandbox has not been started")
        return self._handle

    async def _upload_texts(self, files: Mapping[str, str]) -> None:
        for target, text in files.items():
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="sandbox-upload-") as source:
                source.write(text)
                source.flush()
                await self._provider.upload_file(self._started(), Path(source.name), target)


def _connectable(provider: Any) -> ConnectableProvider:
    if not isinstance(provider, ConnectableProvider):
        raise RuntimeError(f"sandboxes of {provider.name!r} cannot be reached from another process")
    return provider


class Sandbox:
    """The same, blocking: it has a loop in a thread of its own."""

    def __init__(self, provider: JsonMapping | SandboxProvider, spec: SandboxSpec | None = None) -> None:
        self._sandbox = AsyncSandbox(provider, spec)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sandbox", daemon=True)
        self._thread.start()

    def start(self, spec: SandboxSpec | None = None) -> Self:
        self._run(self._sandbox.start(spec))
        return self

    def exec(self, command: str, **options: Any) -> SandboxExecResult:
        return self._run(self._sandbox.exec(command, **options))

    def upload(self, local_path: Path | str, remote_path: str) -> None:
        self._run(self._sandbox.upload(local_path, remote_path))

    def download(self, remote_path: str, local_path: Path | str) -> None:
        self._run(self._sandbox.download(remote_path, local_path))

    def status(self) -> SandboxStatus:
        return SandboxStatus.STOPPED if self._loop.is_closed() else self._run(self._sandbox.status())

    def stop(self) -> None:
        if self._loop.is_closed():
            return
        try:
            self._run(self._sandbox.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(LIMIT_S)
        except TooLate:
            future.cancel()
            raise
