"""What a sandbox may use, and what happens beyond."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from palestra.sandbox import SandboxEnded, SandboxLimits
from palestra.sandbox.local import cgroup
from palestra.sandbox.spec import MIB
from tests.sandbox.conftest import SMALL, Box

NewBox = Callable[..., Box]

GROW = """
import time
x = []
for _ in range(250):
    x.append(bytearray(4 << 20))
    time.sleep(0.01)  # on a busy machine, what grows at once can end the whole sandbox
"""
HOLD = "import time; x = bytearray({mib} << 20); print('got it', flush=True); time.sleep({s})"


def test_a_process_that_takes_too_much_memory_is_killed_and_the_sandbox_goes_on(new_box: NewBox) -> None:
    box = new_box()
    assert box.python(HOLD.format(mib=100, s=0)).text == "got it\n"
    assert box.python(GROW).status == 137
    assert box.sh("echo alive").text == "alive\n"


def test_memory_counts_over_all_processes(new_box: NewBox) -> None:
    box = new_box()
    program = HOLD.format(mib=90, s=60)
    done = box.sh(f'for i in 1 2 3 4; do /usr/bin/python3 -I -S -c "{program}" & done; wait -n; kill %1 %2 %3 %4')
    assert done.status != 124
    assert not done.is_late  # one of them was killed, which ended the wait


def test_shared_pages_count_once(new_box: NewBox) -> None:
    """A process that forks five times after it has loaded 60 MiB holds these once."""
    box = new_box()
    program = """
import os, time
x = bytearray(60 << 20)
for _ in range(5):
    if os.fork() == 0:
        time.sleep(1.5); os._exit(0)
time.sleep(1.5)
print("fine")
"""
    assert box.python(program).text.splitlines()[-1] == "fine"


UNCOUNTED = """
import ctypes, mmap, os, platform
libc = ctypes.CDLL(None, use_errno=True)
ARM = platform.machine() == "aarch64"
kept = []

def in_memory_files():
    kept.append(os.memfd_create("x"))
    return os.write(kept[-1], b"x" * (8 << 20))

def shared(file):
    memory = mmap.mmap(file, 8 << 20)
    memory.write(b"x" * (8 << 20))
    memory.madvise(mmap.MADV_DONTNEED)  # the process does not hold it any more, but it is still there
    kept.append(memory)
    return 8 << 20

def shared_without_a_file():
    return shared(-1)

def shared_zeros():
    return shared(os.open("/dev/zero", os.O_RDWR))

def semaphores():
    made = libc.syscall(*map(ctypes.c_long, (190 if ARM else 64, 0, 32000, 0o1600)))
    if made < 0:
        raise OSError(ctypes.get_errno(), "semget")
    return 32000 * 64

held = 0
try:
    while held < 1 << 30:
        held += %s()
except OSError:
    pass
print(held >> 20)
"""


@pytest.mark.parametrize("kind", ["in_memory_files", "shared_without_a_file", "shared_zeros", "semaphores"])
def test_memory_that_belongs_to_no_process_is_not_to_be_had(new_box: NewBox, kind: str) -> None:
    """Or a cgroup counts it."""
    box = new_box()
    done = box.python(UNCOUNTED % kind)
    assert done.status == 137 or int(done.text) <= (SMALL.memory_bytes + SMALL.disk_bytes) >> 20
    if box.name == "local" and cgroup.place() is None:
        assert done.text == "0\n"


def test_page_tables_count_as_memory(new_box: NewBox) -> None:
    """A process that has only read from each part of a large mapping holds nothing else."""
    program = """
import ctypes, mmap
size = 1 << 40
memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, mmap.PROT_READ)
memory.madvise(15)  # no huge pages
for at in range(0, size, 2 << 20):
    memory[at]
print("got it")
"""
    box = new_box()
    try:
        done = box.python(program)
    except SandboxEnded as error:
        assert "of 256 MiB" in str(error)  # noqa: PT017
    else:
        assert done.status == 137


def test_zeros_can_be_read(box: Box) -> None:
    assert box.sh("head -c 1000000 /dev/zero | wc -c; dd if=/dev/zero bs=3 count=1 2>/dev/null").text == (
        "1000000\n\0\0\0"
    )


def test_all_that_is_written_has_one_limit(new_box: NewBox) -> None:
    box = new_box()
    program = """
import os
total = 0
for folder in {"/work", "/tmp", "/dev/shm", os.environ["HOME"]}:
    try:
        with open(folder + "/x", "wb", buffering=0) as file:
            while True:
                total += file.write(b"x" * 65536)
    except OSError as error:
        pass
print(total >> 20)
"""
    assert int(box.python(program).text) <= SMALL.disk_bytes >> 20
    assert box.sh("rm -f /work/x /tmp/x /dev/shm/x ~/x; echo fine > /work/y; cat /work/y").text == "fine\n"


def test_the_number_of_files_has_a_limit(new_box: NewBox) -> None:
    """In a container, its memory is the limit."""
    box = new_box()
    program = """
count = 0
try:
    while count < 100000:
        open(f"/work/{count}", "wb").close()
        count += 1
except OSError as error:
    print(error.errno)
"""
    if box.name == "local":
        assert box.python(program).text == "28\n"


def test_a_fork_bomb_stays_in_its_sandbox(new_box: NewBox, box: Box) -> None:
    bombed = new_box()
    done = bombed.sh("bomb() { bomb | bomb & }; bomb; sleep 0.3; ls -d /proc/[0-9]* | wc -l", limit_s=20)
    assert done.status == 2 or int(done.text) <= SMALL.processes  # or there was no process left to count
    assert box.sh("echo untouched").text == "untouched\n"
    assert bombed.inner  # and it is stopped like any other


def test_processes_are_counted_for_each_sandbox(new_box: NewBox, box: Box) -> None:
    program = """
import os, time
count = 0
try:
    while count < 1000:
        if os.fork() == 0:
            time.sleep(100)
        count += 1
except OSError:
    print(count)
os.kill(-1, 9)
"""
    for one in (box, new_box()):
        assert SMALL.processes - 5 <= int(one.python(program).text.strip() or 0) <= SMALL.processes


def test_cores_are_as_many_as_were_given(new_box: NewBox) -> None:
    box = new_box(limits=SandboxLimits(cpus=1, memory_bytes=256 * MIB))
    program = """
import os
try:
    os.sched_setaffinity(0, range(64))
except OSError:
    pass
print(len(os.sched_getaffinity(0)))
"""
    if box.name == "local":
        assert box.python(program).text == "1\n"
    else:  # by its cgroup, in either version
        shown = "cat /sys/fs/cgroup/cpu.max 2>/dev/null || cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us"
        assert box.sh(shown).text.split()[0] == "100000"


@pytest.mark.slow
def test_a_sandbox_that_outgrows_the_killing_is_ended(new_box: NewBox) -> None:
    program = """
import os, time
for _ in range(5):
    os.fork()
x = [bytearray(1 << 20) for _ in range(100)]
time.sleep(60)
"""
    box = new_box()
    try:
        done = box.python(program)
    except SandboxEnded as error:
        assert "of 256 MiB" in str(error)  # noqa: PT017
    else:
        assert done.status == 137 or (done.is_late and box.name != "local")  # a cgroup kills until the rest fits
