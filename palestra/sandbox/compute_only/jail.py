"""The sandbox around this process: after `enter` it can compute and answer through what is open, and nothing else.

It cannot be left again.

On Linux the kernel refuses every system call that computing does not need: no file can be opened, no socket, no process
started. Elsewhere Python's audit hook refuses the same by name, which stops mistakes but not a determined attacker.
"""

from __future__ import annotations

import resource
import sys

from palestra.sandbox import seccomp

REFUSED_EVENTS = ("open", "socket.", "subprocess.", "ctypes.", "shutil.", "os.", "pty.", "urllib.", "tempfile.")
QUIET_EVENTS = ("os.listdir", "os.scandir")
"""Part of searching a module: the module is then not found, which is the clearer error."""


def enter(memory_bytes: int, cpu_s: int) -> bool:
    """Enters the sandbox; returns whether the kernel supports it."""
    is_tight = _filter_syscalls(memory_bytes, cpu_s)
    sys.addaudithook(_refuse)
    return is_tight


def _refuse(event: str, _args: tuple[object, ...]) -> None:
    if event.startswith(REFUSED_EVENTS):
        what = "look for files" if event in QUIET_EVENTS else f"do this ({event})"
        raise PermissionError(f"untrusted code may not {what}")


def _limit(memory_bytes: int, cpu_s: int) -> None:
    for kind, value in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_CORE, 0)):
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):
            pass  # the present limit is lower, or the system has none of this kind
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _filter_syscalls(memory_bytes: int, cpu_s: int) -> bool:
    program = seccomp.compute_only()
    _limit(memory_bytes, cpu_s)
    return program is not None and seccomp.load(program)
