"""The command line of bubblewrap: what a local sandbox sees of the machine."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from palestra.sandbox import first_process, seccomp
from palestra.sandbox.errors import SandboxError, SandboxUnavailable
from palestra.sandbox.local.launch import SCRATCH
from palestra.sandbox.spec import HOME, SandboxSpec
from palestra.util.programs import missing

USER = 1000
PROGRAMS = ("bin", "lib", "lib32", "lib64", "sbin", "usr")
SETTINGS = """
    alternatives ca-certificates ca-certificates.conf crypto-policies ld.so.cache ld.so.conf ld.so.conf.d localtime
    mime.types pki protocols services ssl/certs ssl/openssl.cnf terminfo timezone
"""
"""What of /etc programs need; there are no secrets among it."""
TEXTS = {
    "/etc/passwd": f"agent:x:{USER}:{USER}:agent:{HOME}:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "/etc/group": f"agent:x:{USER}:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
NOT_OF_AN_IMAGE = {"dev", "proc", "sys", "tmp", "run", "home"}
OLDEST_KERNEL = (5, 14)
"""The first in which RLIMIT_NPROC counts the processes of a user namespace, not of a user."""


def arguments(spec: SandboxSpec, writable: list[str], *, has_cgroup: bool) -> list[str]:
    """Returns what bubblewrap is called with. `writable` are folders that are mounted later. Raises SandboxError."""
    if spec.image is not None and not Path(spec.image).is_dir():
        raise SandboxError(f"{spec.image} is no folder: a local sandbox has no images (docker and podman do)")
    for folder in spec.host_folders:
        if any(Path(folder).is_relative_to(own) for own in writable):
            raise SandboxError(f"the host's {folder} cannot be seen in a sandbox: it has its own folder there")
    found = ["--unshare-user", "--unshare-all", "--die-with-parent", "--as-pid-1"]
    found += ["--uid", str(USER), "--gid", str(USER), "--hostname", "sandbox"]
    found += _root(Path(spec.image), writable) if spec.image else _programs()
    found += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
    if not has_cgroup:  # memory shared through /dev/zero belongs to no process; /dev/full has zeros, but no such memory
        found += ["--dev-bind", "/dev/full", "/dev/zero"]
    for folder in spec.host_folders:
        found += ["--ro-bind", folder, folder]
    for folder in (SCRATCH, "/run", *writable):
        found += ["--dir", folder]
    found += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    return [*found, "--", first_process.PATH]


def texts(spec: SandboxSpec) -> dict[str, str]:
    """Returns the files that are made for the sandbox; an image has its own."""
    return {} if spec.image else TEXTS


def _programs() -> list[str]:
    found: list[str] = []
    for name in PROGRAMS:
        found += _visible(Path("/") / name)
    for name in SETTINGS.split():
        found += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return found


def _root(image: Path, writable: list[str]) -> list[str]:
    hidden = NOT_OF_AN_IMAGE | {Path(one).parts[1] for one in writable}
    found: list[str] = []
    for entry in sorted(image.iterdir()):
        if entry.name not in hidden:
            found += _visible(entry)
    return found


def _visible(entry: Path) -> list[str]:
    """A folder at the top of a root file system, read only; a link as it is."""
    if entry.is_symlink():
        return ["--symlink", str(entry.readlink()), f"/{entry.name}"]
    return ["--ro-bind", str(entry), f"/{entry.name}"] if entry.is_dir() else []


def program() -> str:
    """Returns where bubblewrap is. Only call it where there is no `problem`."""
    return shutil.which("bwrap") or "bwrap"


def problem() -> str | None:
    """Returns what is missing here for a sandbox that holds; None: nothing. It tries what it can."""
    if sys.platform != "linux":
        return "the local sandbox needs Linux"
    if seccomp.contained(has_cgroup=False) is None:
        return f"there is no filter of system calls for {platform.machine()} (only x86_64 and aarch64)"
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    if release is None or (int(release[1]), int(release[2])) < OLDEST_KERNEL:
        return f"Linux {platform.release()} cannot limit the processes of a sandbox; 5.14 or newer can"
    if absent := missing("bubblewrap"):
        return absent
    try:
        _trial()
    except SandboxUnavailable as error:
        return str(error)
    return None


@functools.cache
def _trial() -> None:
    """Runs `true` as bubblewrap would run a sandbox; once, if that works. Raises SandboxUnavailable."""
    spaces = ["--unshare-user", "--unshare-all", "--uid", str(USER), "--proc", "/proc", "--dev", "/dev"]
    command, user = [program(), *spaces, *_programs(), "--", "/bin/true"], unprivileged_user()
    groups = None if user is None else []
    try:
        tried = subprocess.run(
            command, capture_output=True, text=True, check=False, user=user, group=user, extra_groups=groups
        )
    except OSError as error:
        raise SandboxUnavailable(f"root cannot become an unprivileged user here: {error}") from error
    if tried.returncode:
        errors = tried.stderr.strip().splitlines()
        raise SandboxUnavailable(
            f"bubblewrap cannot make user namespaces here: {errors[-1] if errors else tried.returncode}"
        )


def unprivileged_user() -> int | None:
    """Returns a user of whom nothing on this machine is, for owners who are root; None: as the owner."""
    return 0x70000000 + os.getpid() % (1 << 24) if os.geteuid() == 0 else None
