"""The sandbox around this process: after `enter` it can compute and answer through what is open, and nothing else.

Owns: limits, the filter of system calls, refusing by name where there is no such filter. Never touches: what runs
inside. It cannot be left again.

On Linux the kernel refuses every system call that computing does not need: no file can be opened, no socket, no process
started. Elsewhere Python's audit hook refuses the same by name, which stops mistakes but not a determined attacker.
"""

from __future__ import annotations

import ctypes
import platform
import resource
import struct
import sys

# Numbers of the calls that remain: memory, clocks and timers, locks, signals to itself, open descriptors, exit.
SYSCALLS = {
    "x86_64": (
        0xC000003E,  # AUDIT_ARCH
        "0 1 3 5 7 8 9 10 11 12 13 14 15 24 25 28 35 38 39 60 96 131 186 201 202 219 228 229 230 231 318 334",
    ),
    "aarch64": (
        0xC00000B7,
        (
            "57 62 63 64 73 80 93 94 98 101 103 113 114 115 124 128 132 134 135 139 169 172 178 214 215 216 222 226 "
            "233 278"
        ),
    ),
}
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # refuse: with EPERM

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
    known = SYSCALLS.get(platform.machine()) if sys.platform == "linux" else None
    libc = ctypes.CDLL(None, use_errno=True) if known else None
    _limit(memory_bytes, cpu_s)
    if known is None or libc is None:
        return False
    program = _program(known[0], [int(number) for number in known[1].split()])

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))

    filters = Filter(len(program) // 8, program)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(filters), 0, 0) == 0


def _program(architecture: int, allowed: list[int]) -> bytes:
    """Returns a program for the kernel's packet filter: another architecture ends the process, other calls fail."""
    count = len(allowed)
    checks = [
        _instruction(JUMP_IF_EQUAL, number, if_true=count - place) for place, number in enumerate(allowed)
    ]  # skips the other checks and the refusal
    return b"".join(
        (
            _instruction(LOAD, 4),
            _instruction(JUMP_IF_EQUAL, architecture, if_true=1),
            _instruction(RETURN, KILL),
            _instruction(LOAD, 0),
            *checks,
            _instruction(RETURN, REFUSE),
            _instruction(RETURN, ALLOW),
        )
    )


def _instruction(code: int, value: int, if_true: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, 0, value)
