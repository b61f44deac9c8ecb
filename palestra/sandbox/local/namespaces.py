"""The way of helper processes into a sandbox: system calls that Python has no function for.

It imports the standard library only.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
from typing import Any

NEW_TIME, NEW_MOUNTS, NEW_CGROUP, NEW_UTS = 0x80, 0x20000, 0x2000000, 0x4000000
NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x8000000, 0x10000000, 0x20000000, 0x40000000
ALL = NEW_MOUNTS | NEW_CGROUP | NEW_UTS | NEW_IPC | NEW_USER | NEW_PID | NEW_NET
OWNING_USER_NAMESPACE = 0xB701  # NS_GET_USERNS
NO_SUID, NO_DEVICES, BIND, MOVE_AWAY = 2, 4, 4096, 2  # the last: MNT_DETACH
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
CAPABILITIES_V3, LAST_CAPABILITY = 0x20080522, 63
SIGKILL = 9

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def enter(descriptor: int, kinds: int) -> None:
    """Enters namespaces: those of a process, by its pidfd, or one by its own descriptor."""
    _checked(_libc.setns(descriptor, kinds), "cannot enter the sandbox's namespaces")


def enter_as_owner(pid: int) -> None:
    """Enters the mounts and the network of a process with the right to change them."""
    mounts, network = (os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("mnt", "net"))
    owner = fcntl.ioctl(mounts, OWNING_USER_NAMESPACE)
    enter(owner, NEW_USER)
    enter(network, NEW_NET)
    enter(mounts, NEW_MOUNTS)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if one is None else one.encode() for one in (source, target, kind, options)]
    _checked(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"cannot mount {target}")


def unmount(target: str) -> None:
    _checked(_libc.umount2(target.encode(), MOVE_AWAY), f"cannot unmount {target}")


def hide() -> None:
    """Hides this process from the sandbox while it is partly inside."""
    _checked(_libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "cannot hide")


def die_with_parent() -> None:
    _checked(_libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "cannot ask for the parent's death")


def become(user: int | None) -> None:
    """Gives up root for good."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def drop_capabilities() -> None:
    for number in range(LAST_CAPABILITY + 1):
        _libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)  # fails for those that the kernel does not know

    header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
    none = (ctypes.c_uint32 * 6)()
    _checked(_libc.capset(header, none), "cannot drop capabilities")


def limit(limits: dict[str, int]) -> None:
    """Sets limits by name, such as NPROC; a present one that is lower stays."""
    for name, value in limits.items():
        kind: Any = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))


def be_first_to_go() -> None:
    """Makes the kernel end sandboxes first when the machine runs out of memory."""
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
