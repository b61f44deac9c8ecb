"""Attacks on a sandbox, as programs that run in it. Each prints `held` or what it got.

They need Python, and nothing else, in the sandbox.
"""

from __future__ import annotations

COMMON = """
import ctypes, errno, os, platform, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
ARM = platform.machine() == "aarch64"

def call(x86, arm, *args):
    given = (ctypes.c_long(one) if isinstance(one, int) else one for one in args)
    return libc.syscall(ctypes.c_long(arm if ARM else x86), *given)

def refused(what, attempt):
    try:
        got = attempt()
    except OSError as error:
        return
    if isinstance(got, int) and got == -1:
        return
    print("GOT", what, repr(got)[:200])
"""

FILES = """
for path in ("/etc/shadow", "/etc/sudoers", "/root", "/var/log", "/boot", "/home/%(user)s", "%(secret_file)s",
             "/proc/1/root/root", "/proc/1/cwd/root", "/proc/self/root/root", "/proc/kcore", "/dev/mem", "/dev/sda",
             "/dev/vda", "/dev/kmsg", "/run/docker.sock", "/var/run/docker.sock", "/proc/1/environ_"):
    refused(path, lambda: os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1))
for path in ("/usr/x", "/etc/x", "/x", "/bin/x", "/lib/x", "/dev/x", "/run/x", "/proc/x", "/.scratch/x"):
    refused("wrote " + path, lambda: open(path, "wb"))
for path in ("/usr/bin/env", "/bin/sh", "/etc/passwd", "/etc/hosts", "/usr/bin/python3", "/proc/self/exe"):
    refused("opened for writing " + path, lambda: os.open(path, os.O_WRONLY))
    refused("removed " + path, lambda: os.unlink(path))
    refused("chmod " + path, lambda: os.chmod(path, 0o777))
"""

LINKS = """
os.chdir("/tmp")
for place, target in enumerate(("%(secret_file)s", "/proc/1/root%(secret_file)s", "../" * 20 + "%(secret_file)s"[1:])):
    os.symlink(target, f"link{place}")
    refused("through a link", lambda: open(f"link{place}").read())
refused("hard link to a program", lambda: os.link("/usr/bin/env", "/tmp/env"))
refused("block device", lambda: os.mknod("/tmp/disk", 0o60666, os.makedev(254, 0)) or open("/tmp/disk", "rb").read(1))
refused("memory device", lambda: os.mknod("/tmp/mem", 0o20666, os.makedev(1, 1)) or open("/tmp/mem", "rb").read(1))
handle = ctypes.create_string_buffer(struct.pack("Ii", 8, 1) + struct.pack("II", 2, 0))
refused("file by handle", lambda: call(304, 265, os.open("/usr", 0), handle, 0))
os.system("rm -f /tmp/link*")
"""

NETWORK = """
def connect(family, address, kind=socket.SOCK_STREAM, protocol=0):
    with socket.socket(family, kind, protocol) as one:
        one.settimeout(0.5)
        one.connect(address)
        return address
for host in ("127.0.0.1", "%(host)s", "192.0.2.1", "169.254.169.254"):
    refused("TCP to " + host, lambda: connect(socket.AF_INET, (host, %(port)d)))
refused("TCP by IPv6", lambda: connect(socket.AF_INET6, ("::1", %(port)d)))
refused("UDP", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53)))
refused("a name's address", lambda: socket.getaddrinfo("example.com", 80))
refused("an abstract Unix socket of the owner", lambda: connect(socket.AF_UNIX, "\\0%(abstract)s"))
refused("a Unix socket of the owner", lambda: connect(socket.AF_UNIX, "%(socket_file)s"))
refused("a raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
refused("a packet socket", lambda: socket.socket(17, socket.SOCK_RAW, 3))
refused("VSOCK", lambda: socket.socket(40, socket.SOCK_STREAM))
refused("SCTP", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132))
refused("MPTCP", lambda: socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 262))
with open("/proc/net/dev") as file:
    names = [line.split(":")[0].strip() for line in file if ":" in line]
if names != ["lo"]:
    print("GOT interfaces", names)
"""

KERNEL_SOCKETS = """
for protocol in (4, 6, 9, 12, 15, 16):
    refused(f"netlink {protocol}", lambda: socket.socket(16, socket.SOCK_RAW, protocol))
for family in (3, 5, 9, 29, 31, 38, 44):
    refused(f"socket family {family}", lambda: socket.socket(family, socket.SOCK_STREAM))
"""

PROCESSES = """
refused("processes of others", lambda: [n for n in os.listdir("/proc") if n.isdigit() and int(n) > 30000] or -1)
for pid in (%(owner)d, %(owner)d - 1):
    refused(f"signal to {pid}", lambda: os.kill(pid, 0))
    refused(f"pidfd of {pid}", lambda: os.pidfd_open(pid))
    refused(f"memory of {pid}", lambda: open(f"/proc/{pid}/mem", "rb"))
child = os.fork()
if child == 0:
    import time; time.sleep(20); os._exit(0)
refused("ptrace attach", lambda: call(101, 117, 16, child, 0, 0))
refused("ptrace seize", lambda: call(101, 117, 0x4206, child, 0, 0))
refused("ptrace traceme", lambda: call(101, 117, 0, 0, 0, 0))
buffer = ctypes.create_string_buffer(8)
vector = struct.pack("PN", ctypes.addressof(buffer), 8)
refused("memory of another process", lambda: call(310, 270, child, vector, 1, vector, 1, 0))
refused("a descriptor of another process", lambda: call(438, 438, os.pidfd_open(child), 0, 0))
os.kill(child, 9)
"""

FIRST_PROCESS = """
for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
    refused(f"memory of process 1, opened with {flags}", lambda: os.open("/proc/1/mem", flags))
    for number in range(8):
        refused(f"descriptor {number} of process 1, with {flags}", lambda: os.open(f"/proc/1/fd/{number}", flags))
for name in ("environ", "auxv", "maps", "smaps", "pagemap", "syscall", "stack", "io"):
    refused(name + " of process 1", lambda: open(f"/proc/1/{name}", "rb").read(8))
refused("files in memory of process 1", lambda: os.listdir("/proc/1/map_files"))
refused("safety from the OOM killer", lambda: os.write(os.open("/proc/1/oom_score_adj", os.O_WRONLY), b"-1000"))
for name in ("exe", "cwd", "root", "fd/0", "fd/1", "ns/mnt", "ns/user", "task/1/exe"):
    refused(name + " of process 1", lambda: os.readlink(f"/proc/1/{name}"))
refused("memory of a thread of process 1", lambda: os.open("/proc/1/task/1/mem", os.O_RDWR))
refused("ptrace attach to process 1", lambda: call(101, 117, 16, 1, 0, 0))
refused("ptrace seize of process 1", lambda: call(101, 117, 0x4206, 1, 0, 0))
buffer = ctypes.create_string_buffer(8)
vector, there = (struct.pack("PN", address, 8) for address in (ctypes.addressof(buffer), 0x400000))
refused("reading memory of process 1", lambda: call(310, 270, 1, vector, 1, there, 1, 0))
refused("writing memory of process 1", lambda: call(311, 271, 1, vector, 1, there, 1, 0))
refused("a descriptor of process 1", lambda: call(438, 438, os.pidfd_open(1), 0, 0))
status = open("/proc/1/status").read()
for name, expected in (("CapInh", 0), ("CapPrm", 0), ("CapEff", 0), ("CapBnd", 0), ("CapAmb", 0), ("NoNewPrivs", 1),
                       ("Seccomp", 2)):
    if int(status.partition(name + ":")[2].split()[0], 16) != expected:
        print("GOT", name, "of process 1")
for _ in range(20):  # children whose parent has ended: process 1 must not keep them
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.wait()
import time
deadline = time.time() + 5
def zombies():
    for name in os.listdir("/proc"):
        try:
            fields = open(f"/proc/{name}/stat").read().rpartition(")")[2].split() if name.isdigit() else "X"
        except OSError:
            continue
        if fields[0] == "Z" and fields[1] == "1":
            yield name
while list(zombies()) and time.time() < deadline:
    time.sleep(0.01)
if left := list(zombies()):
    print("GOT processes that nobody waits for", left)
for number in (1, 2, 9, 11, 15, 17, 19, 31, 40):
    os.kill(1, number)
"""

NAMESPACES = """
refused("mount tmpfs", lambda: call(165, 40, b"t", b"/tmp", b"tmpfs", 0, None))
refused("mount proc", lambda: call(165, 40, b"proc", b"/tmp", b"proc", 0, None))
refused("remount / writable", lambda: call(165, 40, b"", b"/", None, 32 | 4096, None))
refused("bind /usr writable", lambda: call(165, 40, b"/usr", b"/tmp", None, 4096, None))
refused("umount", lambda: call(166, 39, b"/proc", 2))
refused("pivot_root", lambda: call(155, 41, b"/tmp", b"/tmp"))
refused("chroot", lambda: os.chroot("/tmp"))
for name, flag in (("user", 0x10000000), ("mounts", 0x20000), ("pid", 0x20000000), ("net", 0x40000000)):
    refused("unshare " + name, lambda: call(272, 97, flag))
    refused("unshare user and " + name, lambda: call(272, 97, 0x10000000 | flag))
def clone(flags):
    got = call(56, 220, flags | 17, 0, 0, 0, 0)
    if got == 0:
        os._exit(0)
    return got
refused("clone with a user namespace", lambda: clone(0x10000000))
args = ctypes.create_string_buffer(struct.pack("11Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0))
def clone3():
    got = call(435, 435, args, 88)
    if got == 0:
        os._exit(0)
    return got
refused("clone3 with a user namespace", clone3)
for kind in ("mnt", "net", "pid", "user"):
    refused("enter the namespace of 1: " + kind, lambda: call(308, 268, os.open(f"/proc/1/ns/{kind}", 0), 0))
refused("fsopen", lambda: call(430, 430, b"tmpfs", 0))
refused("open_tree", lambda: call(428, 428, -100, b"/usr", 1))
refused("mount_setattr", lambda: call(442, 442, -100, b"/usr", 0, ctypes.create_string_buffer(32), 32))
"""

PRIVILEGES = """
refused("setuid(0)", lambda: os.setuid(0))
refused("setresuid(0)", lambda: os.setresuid(0, 0, 0))
refused("setgid(0)", lambda: os.setgid(0))
refused("setgroups", lambda: os.setgroups([0, 27]))
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
every = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
refused("capabilities", lambda: libc.capset(header, every))
status = open("/proc/self/status").read()
for name in ("CapPrm", "CapEff", "CapAmb"):
    if int(status.partition(name + ":")[2].split()[0], 16):
        print("GOT", name)
if int(status.partition("NoNewPrivs:")[2].split()[0]) != 1:
    print("GOT new privileges")
import subprocess
for program in ("su -c id", "mount -t tmpfs t /tmp", "sudo -n id", "newgrp root", "unshare -Ur id", "chroot /tmp id"):
    done = subprocess.run(["sh", "-c", program], capture_output=True, stdin=subprocess.DEVNULL)
    if done.returncode == 0 and b"uid=0" in done.stdout:
        print("GOT", program)
"""

KERNEL = """
for name, x86, arm, args in (
    ("bpf", 321, 280, (0, b"\\0" * 128, 128)), ("perf_event_open", 298, 241, (b"\\0" * 128, 0, -1, -1, 0)),
    ("add_key", 248, 217, (b"user", b"n", b"v", 1, -3)), ("keyctl", 250, 219, (0, -3, 1)),
    ("kexec_load", 246, 104, (0, 0, 0, 0)), ("init_module", 175, 105, (b"", 0, b"")),
    ("reboot", 169, 142, (0, 0, 0, 0)), ("swapon", 167, 224, (b"/tmp/x", 0)),
    ("acct", 163, 89, (b"/tmp/x",)), ("sethostname", 170, 161, (b"x", 1)),
    ("settimeofday", 164, 170, (b"\\0" * 16, None)), ("syslog", 103, 116, (3, ctypes.create_string_buffer(64), 64)),
    ("io_uring_setup", 425, 425, (8, ctypes.create_string_buffer(120))), ("quotactl", 179, 60, (0, b"/", 0, None)),
    ("userfaultfd", 323, 282, (1,)), ("fanotify_init", 300, 262, (0, 0))):
    refused(name, lambda: call(x86, arm, *args))
for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname",
             "/proc/sys/vm/overcommit_memory", "/proc/self/uid_map", "/proc/1/uid_map",
             "/proc/sys/user/max_user_namespaces", "/proc/sys/kernel/sem", "/proc/sys/kernel/shmmax",
             "/proc/sys/kernel/pid_max", "/proc/sys/kernel/ns_last_pid", "/proc/sys/fs/mqueue/queues_max",
             "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/ping_group_range", "/sys/fs/cgroup/cgroup.procs",
             "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes",
             "/sys/fs/cgroup/pids/pids.max", "/sys/kernel/mm/transparent_hugepage/enabled"):
    refused("wrote " + path, lambda: os.write(os.open(path, os.O_WRONLY), b"0 0 1"))
refused("to outlive others when memory is short",
        lambda: os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"-1000"))
for folder in ("/proc/sys", "/sys"):
    for above, _, names in os.walk(folder):
        for name in names:
            refused(f"opened {above}/{name}", lambda: os.open(f"{above}/{name}", os.O_WRONLY | os.O_NONBLOCK))
refused("a cgroup", lambda: os.mkdir("/sys/fs/cgroup/x"))
refused("a cgroup of memory", lambda: os.mkdir("/sys/fs/cgroup/memory/x"))
import fcntl
master, slave = os.openpty()
refused("typing into a terminal", lambda: fcntl.ioctl(slave, 0x5412, b"x"))
refused("typing by 64 bits", lambda: call(16, 29, slave, 0x100005412, ctypes.c_char_p(b"x")))
refused("realtime", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
refused("priority", lambda: os.setpriority(os.PRIO_PROCESS, 0, -10))
"""

DESCRIPTORS = """
for number in range(1024):
    try:
        target = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        continue
    if not target.startswith(("pipe:", "/dev/null")):
        print("GOT descriptor", number, target)
for number in range(3, 1024):
    refused(f"write to descriptor {number}", lambda: os.write(number, b"x"))
for name in os.listdir("/proc/1/fd") if os.access("/proc/1/fd", os.R_OK) else ():
    target = os.readlink(f"/proc/1/fd/{name}")
    if not target.startswith(("pipe:", "/dev/null")):
        print("GOT descriptor of process 1", name, target)
refused("the program outside", lambda: os.open("/proc/1/exe", os.O_WRONLY))
"""

ENTERING = """
import time
deadline = time.time() + 1.0
while time.time() < deadline:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            for part in ("exe", "cwd", "root"):
                try:
                    target = os.readlink(f"/proc/{name}/{part}")
                except OSError:
                    continue
                if not target.startswith(("/usr", "/bin", "/work")) and target != "/":
                    print("GOT", part, target)
            try:
                open(f"/proc/{name}/mem", "rb").close()
                targets = [os.readlink(f"/proc/{name}/fd/{one}") for one in os.listdir(f"/proc/{name}/fd")]
            except OSError:
                continue
            for target in targets:
                if target.startswith(("socket:", "anon_inode:")):
                    print("GOT", target)
"""
"""Runs while other commands enter: their helpers must not be seen on the way."""

ATTACKS = {
    "files": FILES,
    "links": LINKS,
    "network": NETWORK,
    "kernel sockets": KERNEL_SOCKETS,
    "processes": PROCESSES,
    "first process": FIRST_PROCESS,
    "namespaces": NAMESPACES,
    "privileges": PRIVILEGES,
    "kernel": KERNEL,
    "descriptors": DESCRIPTORS,
    "entering": ENTERING,
}


def program(name: str, **values: object) -> str:
    """Returns the whole program of an attack."""
    body = ATTACKS[name]
    return COMMON + (body % values if "%(" in body else body) + 'print("held")\n'
