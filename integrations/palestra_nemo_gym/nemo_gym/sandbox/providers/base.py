"""The interface of a provider of sandboxes, and the records that it takes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from nemo_gym.json_types import JsonMapping, JsonObject


class SandboxStatus(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    ERROR = "error"
    UNKNOWN = "unknown"


class SandboxCreateError(RuntimeError):
    """There is no sandbox."""


class SandboxCreateVerificationError(SandboxCreateError):
    """There is one, but it is not fit for use."""


_NUMBERS = {"cpu": float, "memory_mib": int, "disk_gib": int, "gpu": int, "gpu_type": str}


@dataclass(frozen=True)
class SandboxResources:
    cpu: float | None = None
    memory_mib: int | None = None
    disk_gib: int | None = None
    gpu: int | None = None
    gpu_type: str | None = None

    @classmethod
    def from_mapping(cls, resources: JsonMapping | None) -> SandboxResources:
        given = dict(resources or {})
        unknown = sorted(set(given) - {one.name for one in fields(cls)})
        if unknown:
            raise ValueError(f"unknown sandbox resources {', '.join(unknown)}; there are: {', '.join(_NUMBERS)}")
        return cls(**{name: _NUMBERS[name](value) for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class SandboxSpec:
    image: str | None = None
    ttl_s: float | None = None
    ready_timeout_s: float | None = None
    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """By path in the sandbox, their text."""
    metadata: dict[str, str] = field(default_factory=dict)
    resources: SandboxResources | JsonMapping = field(default_factory=SandboxResources)
    entrypoint: list[str] | None = None
    provider_options: JsonObject = field(default_factory=dict)
    ports: tuple[int, ...] = ()
    """Ports of services in the sandbox that are reached from outside."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ports", tuple(int(port) for port in self.ports))
        if not isinstance(self.resources, SandboxResources):
            object.__setattr__(self, "resources", SandboxResources.from_mapping(self.resources))


@dataclass
class SandboxHandle:
    sandbox_id: str
    provider_name: str
    raw: Any
    """The provider's own."""


@dataclass(frozen=True)
class SandboxExecResult:
    stdout: str | None
    stderr: str | None
    return_code: int
    error_type: str | None = None
    """Where the command did not run to its end."""


ExecResult = SandboxExecResult


@dataclass(frozen=True)
class SandboxEndpoint:
    """Where a service in a sandbox is reached."""

    endpoint: str
    headers: dict[str, str] = field(default_factory=dict)


class SandboxProvider(Protocol):
    name: str

    async def create(self, spec: SandboxSpec) -> SandboxHandle: ...

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult: ...

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None: ...

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None: ...

    async def status(self, handle: SandboxHandle) -> SandboxStatus: ...

    async def close(self, handle: SandboxHandle) -> None: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class SupportsSandboxEndpoint(Protocol):
    """A provider whose sandboxes may have services."""

    async def endpoint(self, handle: SandboxHandle, port: int) -> SandboxEndpoint: ...


@runtime_checkable
class ConnectableProvider(Protocol):
    """A provider whose sandboxes can be reached from another process."""

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str | None = None) -> JsonObject: ...

    async def connect(self, descriptor: JsonMapping) -> SandboxHandle: ...
