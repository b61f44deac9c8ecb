"""Settings of a sandbox, and results of commands in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

KIB, MIB, GIB = 1024, 1024**2, 1024**3
STDOUT, STDERR = 1, 2
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of commands, unless one is set."""
HOME = "/home/agent"
OWN_FOLDERS = (HOME, "/tmp", "/dev/shm")
"""Folders that every sandbox of this machine has for itself, in place of the machine's."""

OutputSink = Callable[[int, bytes], Awaitable[None]]
"""Takes a command's output as it comes: a part of STDOUT or STDERR. The command waits where this does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of a sandbox. All but the last two hold for everything in it together."""

    cpus: float = 1.0
    memory_bytes: int = 2 * GIB
    disk_bytes: int = GIB
    """All files that are written, with the temporary ones."""
    processes: int = 512
    """Threads count, too."""
    exec_s: float = 60.0
    """Time of one command, unless `exec` is given another."""
    output_bytes: int = MIB
    """What is kept of a command's standard output, and of its errors; what follows is dropped."""

    def __post_init__(self) -> None:
        for name in ("cpus", "memory_bytes", "disk_bytes", "processes", "exec_s", "output_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"limits.{name} should be more than 0, is {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class EndpointProxy:
    """The one address that a sandbox without a network can reach."""

    url: str
    """The model endpoint as the owner of the sandbox reaches it, such as `http://127.0.0.1:8000/v1`."""
    port: int = 8000
    """The port of 127.0.0.1 in the sandbox at which it appears."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"an endpoint proxy leads to an http:// address, not to {self.url!r}")
        if not 1024 <= self.port <= 65535:
            raise ValueError(f"an endpoint proxy's port should be from 1024 to 65535, is {self.port}")

    @property
    def inside_url(self) -> str:
        """The endpoint's address for programs in the sandbox."""
        return f"http://127.0.0.1:{self.port}{urlsplit(self.url).path}"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port outside."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a sandbox is like when it starts."""

    image: str | None = None
    """The root file system: an OCI image for docker and podman, a folder for local (None: the programs of this machine,
    read only)."""
    host: str | None = None
    """The machine, for backends that reach another: `[user@]name` for ssh, a node's address for ray (None: any)."""
    workdir: str = "/work"
    """Folder in which commands run; writable, and kept by `snapshot`."""
    writable: tuple[str, ...] = ()
    """Further folders that can be written, such as `/tests`; they begin empty. With ssh, the machine says what is."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The environment of commands; nothing of the owner's comes in. The episode's key goes here."""
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Files by path, written before the first command; relative to the working folder."""
    snapshot: Path | None = None
    """What `snapshot` of another sandbox wrote: the working folder begins as that one was."""
    host_folders: tuple[str, ...] = ()
    """Folders of this machine that are visible at the same path, read only: an agent's installation, say."""
    endpoint_proxy: EndpointProxy | None = None
    """None: no network at all."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)

    def __post_init__(self) -> None:
        for path in (self.workdir, *self.writable, *self.host_folders):
            if not path.startswith("/") or ".." in Path(path).parts or path == "/":
                raise ValueError(f"should be an absolute path below /, without .., is {path!r}")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a command."""

    status: int
    """The exit status; 128 and the signal's number if a signal ended the command."""
    stdout: bytes
    stderr: bytes
    is_late: bool = False
    """The command took longer than its limit and was killed."""
    is_truncated: bool = False
    """Whether there was more output than is kept."""

    @property
    def text(self) -> str:
        """The standard output as text."""
        return self.stdout.decode(errors="replace")
