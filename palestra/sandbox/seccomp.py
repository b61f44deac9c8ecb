"""Filters of system calls: programs for the kernel's packet filter, and loading one into this process.

It imports the standard library only, because helper processes load it.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import struct
import sys

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LAST_KNOWN = 462
"""The last system call that was looked at when this was written; the kernel's later ones do not exist in a sandbox,
until this number is raised."""
LATER = ["setxattrat", "getxattrat", "listxattrat", "removexattrat", "open_tree_attr", "file_getattr", "file_setattr"]

COMPUTING = {
    "x86_64": "0 1 3 5 7 8 9 10 11 12 13 14 15 24 25 28 35 38 39 60 96 131 186 201 202 219 228 229 230 231 318 334",
    "aarch64": (
        "57 62 63 64 73 80 93 94 98 101 103 113 114 115 124 128 132 134 135 139 169 172 178 214 215 216 222 226 233 278"
    ),
}
"""The calls that computing needs: memory, clocks and timers, locks, signals to itself, open descriptors, exit."""

# By name: the number on x86_64 and on aarch64 (0: there is none).
OTHER_PROCESSES = {"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)}
OTHER_PROCESSES |= {"kcmp": (312, 272), "pidfd_getfd": (438, 438), "process_madvise": (440, 440)}
OTHER_PROCESSES |= {"move_pages": (279, 239), "migrate_pages": (256, 238), "sched_setaffinity": (203, 122)}
MOUNTS = {"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51)}
MOUNTS |= {"move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431)}
MOUNTS |= {"fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442)}
MOUNTS |= {"setns": (308, 268), "unshare": (272, 97), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265)}
KERNEL = {"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262)}
KERNEL |= {"keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "memfd_secret": (447, 447)}
KERNEL |= {"kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "acct": (163, 89)}
KERNEL |= {"init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "syslog": (103, 116)}
KERNEL |= {"swapon": (167, 224), "swapoff": (168, 225), "quotactl": (179, 60), "quotactl_fd": (443, 443)}
KERNEL |= {"settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171)}
KERNEL |= {"sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58), "lookup_dcookie": (212, 18)}
KERNEL |= {"nfsservctl": (180, 42), "iopl": (172, 0), "ioperm": (173, 0), "modify_ldt": (154, 0), "uselib": (134, 0)}
ABSENT = {"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427)}
ABSENT |= {"clone3": (435, 435), "io_setup": (206, 0)}  # on aarch64, 0 is its number
"""Programs have another way where these do not exist. The filter cannot see what they would do; of what `io_setup`
makes, there is a number for the whole machine."""
UNCOUNTED_MEMORY = {"memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190)}
UNCOUNTED_MEMORY |= {"vmsplice": (278, 75)}
"""Memory that belongs to no process: only a cgroup counts it."""
CLONE, SOCKET, IOCTL, MMAP = (56, 220), (41, 198), (16, 29), (9, 222)

NEW_NAMESPACES = 0x7E020000
"""The flags of `clone` that make a namespace."""
UNIX, INET, INET6, NETLINK = 1, 2, 10, 16
SHARED, ANONYMOUS = 1, 0x20
OTHER_PROTOCOLS = (33, 115, 132, 136, 256, 262)  # DCCP, L2TP, SCTP, UDP-Lite, SMC, MPTCP
TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, JUMP_IF_GREATER, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # places in what the kernel shows to the filter


def compute_only() -> bytes | None:
    """Returns the filter under which a process can only compute; None where there is no such filter."""
    machine = _machine()
    if machine is None:
        return None
    numbers = [int(number) for number in COMPUTING[machine].split()]
    return _program(machine, [*(_calls(number, [_return(ALLOW)]) for number in numbers), [_fail(errno.EPERM)]])


def contained(*, has_cgroup: bool) -> bytes | None:
    """Returns the filter of a sandbox in namespaces: programs run as usual, but nothing reaches for the walls. Without
    a cgroup, memory that belongs to no process is refused, too. None where there is no such filter."""
    machine = _machine()
    if machine is None:
        return None
    column = list(ARCHITECTURES).index(machine)
    absent = ABSENT if has_cgroup else {**ABSENT, **UNCOUNTED_MEMORY}
    refused = {**OTHER_PROCESSES, **MOUNTS, **KERNEL}
    blocks = [
        [_instruction(JUMP_IF_GREATER, LAST_KNOWN, if_false=1), _fail(errno.ENOSYS)],
        *(_calls(one[column], [_fail(errno.ENOSYS)]) for one in absent.values()),
        *(_calls(one[column], [_fail(errno.EPERM)]) for one in refused.values() if one[column]),
        _calls(CLONE[column], _no_namespaces()),
        _calls(SOCKET[column], _some_sockets()),
        _calls(IOCTL[column], _no_typing()),
        *([] if has_cgroup else [_calls(MMAP[column], _no_shared_memory())]),
        [_return(ALLOW)],
    ]
    return _program(machine, blocks)


def contained_profile() -> dict[str, object]:
    """Returns the same filter as `contained` with a cgroup, in the form that docker and podman take. That form cannot
    say "everything later": what the kernel has beyond LAST_KNOWN is named."""
    families = [3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15]
    fail = functools.partial(_profile_rule, errno.EPERM)
    no_family = functools.partial(_profile_rule, errno.EAFNOSUPPORT, ["socket"])
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [
            _profile_rule(errno.ENOSYS, [*ABSENT, *LATER]),
            fail([*OTHER_PROCESSES, *MOUNTS, *KERNEL]),
            *(fail(["clone"], (0, flag, "SCMP_CMP_MASKED_EQ", flag)) for flag in _bits(NEW_NAMESPACES)),
            *(no_family((0, family, "SCMP_CMP_EQ", 0)) for family in families),
            *(
                _profile_rule(
                    errno.EPROTONOSUPPORT, ["socket"], (0, kind, "SCMP_CMP_EQ", 0), (2, one, "SCMP_CMP_EQ", 0)
                )
                for kind in (INET, INET6)
                for one in OTHER_PROTOCOLS
            ),
            no_family((0, NETLINK, "SCMP_CMP_GT", 0)),
            no_family((0, NETLINK, "SCMP_CMP_EQ", 0), (2, 0, "SCMP_CMP_NE", 0)),
            *(fail(["ioctl"], (1, 0xFFFFFFFF, "SCMP_CMP_MASKED_EQ", request)) for request in TERMINAL_INPUT),
        ],
    }


def _profile_rule(number: int, names: list[str], *arguments: tuple[int, int, str, int]) -> dict[str, object]:
    tests = [{"index": at, "value": one, "op": op, "valueTwo": two} for at, one, op, two in arguments]
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": number, "args": tests}


def _bits(flags: int) -> list[int]:
    return [1 << place for place in range(32) if flags & 1 << place]


def load(program: bytes) -> bool:
    """Loads the filter into this thread for good, and with it all that it starts; returns whether the kernel did."""
    libc = ctypes.CDLL(None, use_errno=True)

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))

    filters = Filter(len(program) // 8, program)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(filters), 0, 0) == 0


def _machine() -> str | None:
    found = platform.machine()
    return found if sys.platform == "linux" and found in ARCHITECTURES else None


def _program(machine: str, blocks: list[list[bytes]]) -> bytes:
    """A block begins with the call's number loaded, and returns or leaves it for the next one. A call of another
    architecture ends the process."""
    return b"".join(
        (
            _instruction(LOAD, ARCHITECTURE),
            _instruction(JUMP_IF_EQUAL, ARCHITECTURES[machine], if_true=1),
            _return(KILL),
            _instruction(LOAD, NUMBER),
            *(one for block in blocks for one in block),
        )
    )


def _calls(number: int, then: list[bytes]) -> list[bytes]:
    return [_instruction(JUMP_IF_EQUAL, number, if_false=len(then)), *then]


def _no_namespaces() -> list[bytes]:
    return [
        _argument(0),
        _instruction(JUMP_IF_ANY_BIT, NEW_NAMESPACES, if_false=1),
        _fail(errno.EPERM),
        _return(ALLOW),
    ]


def _some_sockets() -> list[bytes]:
    """Sockets of the sandbox's own network by common protocols, and netlink to list its interfaces; no
    other kind."""
    known = [
        _argument(2),
        *(one for protocol in OTHER_PROTOCOLS for one in _calls(protocol, [_fail(errno.EPROTONOSUPPORT)])),
        _return(ALLOW),
    ]
    return [
        _argument(0),
        *_calls(UNIX, [_return(ALLOW)]),
        *(one for kind in (INET, INET6) for one in _calls(kind, known)),
        _instruction(JUMP_IF_EQUAL, NETLINK, if_false=3),
        _argument(2),
        *_calls(0, [_return(ALLOW)]),
        _fail(errno.EAFNOSUPPORT),
    ]


def _no_shared_memory() -> list[bytes]:
    """Forbids memory that processes share without a file: it would stay when no process maps it any more."""
    return [
        _argument(3),
        _instruction(JUMP_IF_ANY_BIT, ANONYMOUS, if_false=2),
        _instruction(JUMP_IF_ANY_BIT, SHARED, if_false=1),
        _fail(errno.EPERM),
        _return(ALLOW),
    ]


def _no_typing() -> list[bytes]:
    """Forbids putting characters into a terminal's input."""
    return [
        _argument(1),
        *(one for request in TERMINAL_INPUT for one in _calls(request, [_fail(errno.EPERM)])),
        _return(ALLOW),
    ]


def _argument(place: int) -> bytes:
    return _instruction(LOAD, ARGUMENTS + 8 * place)  # the lower half, which is where all of these flags are


def _fail(number: int) -> bytes:
    return _return(ERRNO | number)


def _return(value: int) -> bytes:
    return _instruction(RETURN, value)


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
