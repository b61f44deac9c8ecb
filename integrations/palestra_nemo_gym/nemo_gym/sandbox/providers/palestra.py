"""The provider `palestra`: sandboxes of Palestra's backends.

What a spec asks for and the backend has not is refused, never left out.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from pathlib import Path

import palestra.sandbox as walls
from nemo_gym.sandbox.providers.base import (
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxResources,
    SandboxSpec,
    SandboxStatus,
)

WORKDIR = "/work"
MAX_FILE = 1 << 30


class PalestraSandboxProvider:
    """Settings: `backend`, `host` (for ssh and ray), `model_url` (the one address that can be reached)."""

    name = "palestra"

    def __init__(self, backend: str = "local", host: str | None = None, model_url: str | None = None) -> None:
        self._backend, self._host, self._model_url = backend, host, model_url
        self._open: dict[str, walls.Sandbox] = {}
        self._endings: list[asyncio.Task[None]] = []

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        try:
            made = walls.sandbox(self._backend, self._spec(spec))
            await made.__aenter__()
        except (walls.SandboxError, ValueError) as error:
            raise SandboxCreateError(f"sandbox backend {self._backend!r}: {error}") from error
        handle = SandboxHandle(uuid.uuid4().hex, self.name, made)
        self._open[handle.sandbox_id] = made
        if spec.ttl_s is not None:
            self._endings.append(asyncio.create_task(_stop_after(made, spec.ttl_s), name="sandbox ttl"))
        return handle

    def _spec(self, spec: SandboxSpec) -> walls.SandboxSpec:
        refused = {"entrypoint": spec.entrypoint, "ports": spec.ports, "provider_options": spec.provider_options}
        if asked := [name for name, value in refused.items() if value]:
            raise ValueError(f"a sandbox of Palestra has no {', '.join(asked)}")
        return walls.SandboxSpec(
            image=spec.image,
            host=self._host,
            workdir=spec.workdir or WORKDIR,
            env=spec.env,
            endpoint_proxy=walls.EndpointProxy(self._model_url) if self._model_url else None,
            limits=_limits(spec.resources),
        )

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        if user is not None:
            raise ValueError("a sandbox of Palestra has one user: leave `user` out")
        try:
            done = await _sandbox(handle).exec(command, cwd=cwd, env=env, limit_s=timeout_s)
        except walls.SandboxError as error:
            return SandboxExecResult(None, str(error), 1, "sandbox")
        error_type = "timeout" if done.is_late else None
        return SandboxExecResult(done.text, done.stderr.decode(errors="replace"), done.status, error_type)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        await _sandbox(handle).write(target_path, await asyncio.to_thread(source_path.read_bytes))

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        data = await _sandbox(handle).read(source_path, max_bytes=MAX_FILE)
        await asyncio.to_thread(target_path.write_bytes, data)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        if handle.sandbox_id not in self._open:
            return SandboxStatus.STOPPED
        try:
            await _sandbox(handle).exec("true")
        except walls.SandboxError:
            return SandboxStatus.STOPPED
        return SandboxStatus.RUNNING

    async def close(self, handle: SandboxHandle) -> None:
        if (made := self._open.pop(handle.sandbox_id, None)) is not None:
            await made.stop()

    async def aclose(self) -> None:
        for ending in self._endings:
            ending.cancel()
        for made in [*self._open.values()]:
            await made.stop()
        self._open.clear()


async def _stop_after(sandbox: walls.Sandbox, ttl_s: float) -> None:
    await asyncio.sleep(ttl_s)
    await sandbox.stop()


def _sandbox(handle: SandboxHandle) -> walls.Sandbox:
    return handle.raw


def _limits(resources: SandboxResources | Mapping[str, object]) -> walls.SandboxLimits:
    assert isinstance(resources, SandboxResources)  # the spec has seen to it
    if resources.gpu or resources.gpu_type:
        raise ValueError("a sandbox of Palestra has no GPU")
    asked = {
        "cpus": resources.cpu,
        "memory_bytes": resources.memory_mib and resources.memory_mib << 20,
        "disk_bytes": resources.disk_gib and resources.disk_gib << 30,
    }
    return walls.SandboxLimits(**{name: value for name, value in asked.items() if value is not None})
