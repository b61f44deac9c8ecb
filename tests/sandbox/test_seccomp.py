"""The filters of system calls, run as the kernel runs them, for both kinds of machine."""

from __future__ import annotations

import errno
import json
import platform
import struct
import sys

import pytest

from palestra.sandbox import seccomp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="filters are Linux's")

ALLOWED, KILLED = seccomp.ALLOW, seccomp.KILL
ARM64, X86 = "aarch64", "x86_64"


def refused(number: int) -> int:
    return seccomp.ERRNO | number


def verdict(program: bytes, machine: str, number: int, *arguments: int) -> int:
    """What the filter answers to a call: a small interpreter of the instructions that filters use."""
    seen = struct.pack("=IIQ6Q", number, seccomp.ARCHITECTURES[machine], 0, *arguments, *[0] * (6 - len(arguments)))
    at, loaded = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("HBBI", program, 8 * at)
        at += 1
        match code:
            case seccomp.LOAD:
                (loaded,) = struct.unpack_from("=I", seen, value)
            case seccomp.RETURN:
                return value
            case seccomp.JUMP_IF_EQUAL:
                at += if_true if loaded == value else if_false
            case seccomp.JUMP_IF_GREATER:
                at += if_true if loaded > value else if_false
            case seccomp.JUMP_IF_ANY_BIT:
                at += if_true if loaded & value else if_false
            case _:
                raise AssertionError(f"unknown instruction {code:#x}")


@pytest.fixture(params=[X86, ARM64])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(platform, "machine", lambda: request.param)
    return request.param


def test_a_sandbox_may_do_what_programs_do(machine: str) -> None:
    program = seccomp.contained(has_cgroup=True)
    assert program is not None
    x86 = {"read": 0, "execve": 59, "clone": 56, "socket": 41, "openat": 257, "futex": 202, "memfd_create": 319}
    arm = {"read": 63, "execve": 221, "clone": 220, "socket": 198, "openat": 56, "futex": 98, "memfd_create": 279}
    calls = x86 if machine == X86 else arm
    assert {name: verdict(program, machine, number, 1) for name, number in calls.items()} == dict.fromkeys(x86, ALLOWED)


@pytest.mark.parametrize("column", [0, 1])
def test_every_refused_call_is_refused(column: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name = (X86, ARM64)[column]
    monkeypatch.setattr(platform, "machine", lambda: name)
    program = seccomp.contained(has_cgroup=False)
    assert program is not None
    for numbers in {**seccomp.OTHER_PROCESSES, **seccomp.MOUNTS, **seccomp.KERNEL}.values():
        if numbers[column]:
            assert verdict(program, name, numbers[column]) == refused(errno.EPERM)
    for numbers in {**seccomp.ABSENT, **seccomp.UNCOUNTED_MEMORY}.values():
        assert verdict(program, name, numbers[column]) == refused(errno.ENOSYS)


def test_arguments_are_looked_at(machine: str) -> None:
    program = seccomp.contained(has_cgroup=True)
    assert program is not None
    column = [X86, ARM64].index(machine)
    clone, socket, ioctl = seccomp.CLONE[column], seccomp.SOCKET[column], seccomp.IOCTL[column]
    assert verdict(program, machine, clone, 0x10000000 | 17) == refused(errno.EPERM)  # a user namespace
    assert verdict(program, machine, clone, 0x3D0F00) == ALLOWED  # a thread
    families = {family: verdict(program, machine, socket, family, 1, 0) for family in range(50)}
    assert [family for family, answer in families.items() if answer == ALLOWED] == [1, 2, 10, 16]
    assert verdict(program, machine, socket, 16, 3, 9) == refused(errno.EAFNOSUPPORT)  # netlink to the audit system
    for protocol, answer in ((0, ALLOWED), (6, ALLOWED), (17, ALLOWED), (132, refused(errno.EPROTONOSUPPORT))):
        assert [verdict(program, machine, socket, family, 1, protocol) for family in (2, 10)] == [answer, answer]
    assert verdict(program, machine, ioctl, 0, 0x5412) == refused(errno.EPERM)
    assert verdict(program, machine, ioctl, 0, 0x5401) == ALLOWED


def test_memory_is_shared_through_files_only_unless_a_cgroup_counts_it(machine: str) -> None:
    mmap = seccomp.MMAP[[X86, ARM64].index(machine)]
    kinds = {"private": 0x22, "of a file": 0x01, "shared": 0x21, "shared and checked": 0x23, "shared, later": 0x4021}
    for has_cgroup in (True, False):
        program = seccomp.contained(has_cgroup=has_cgroup)
        assert program is not None
        answers = {name: verdict(program, machine, mmap, 0, 4096, 3, flags) for name, flags in kinds.items()}
        few = {name for name, answer in answers.items() if answer == refused(errno.EPERM)}
        assert few == (set() if has_cgroup else {"shared", "shared and checked", "shared, later"})


def test_other_architectures_and_later_calls_do_not_exist(machine: str) -> None:
    program = seccomp.contained(has_cgroup=True)
    assert program is not None
    other = ARM64 if machine == X86 else X86
    assert verdict(program, other, 0) == KILLED
    for number in (463, 1000, 0x40000000 | 165):  # the last is mount, by the x32 way
        assert verdict(program, machine, number) == refused(errno.ENOSYS)


def test_computing_is_all_that_is_left(machine: str) -> None:
    program = seccomp.compute_only()
    assert program is not None
    allowed = {int(number) for number in seccomp.COMPUTING[machine].split()}
    for number in range(500):
        assert verdict(program, machine, number) == (ALLOWED if number in allowed else refused(errno.EPERM))


def test_an_unknown_machine_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert seccomp.contained(has_cgroup=True) is None
    assert seccomp.compute_only() is None


def test_containers_get_the_same_list() -> None:
    profile = json.dumps(seccomp.contained_profile())
    for name in (*seccomp.OTHER_PROCESSES, *seccomp.MOUNTS, *seccomp.KERNEL, *seccomp.ABSENT):
        assert f'"{name}"' in profile
