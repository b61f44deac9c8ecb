"""Limits by cgroup v2, where the owner of a sandbox may make one."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from pathlib import Path
from typing import Self

import psutil

from palestra.sandbox.spec import SandboxLimits

NAME = "palestra-sandbox"
NEEDED = {"memory", "pids"}
PERIOD_US = 100_000

_numbers = itertools.count()


@functools.cache
def place() -> Path | None:
    """Returns the nearest cgroup above this process in which sandboxes with limits can be made; None: there is none."""
    root, own = _mounted(), _own()
    if root is None or own is None:
        return None
    above = [root / own.lstrip("/"), *(root / own.lstrip("/")).parents]
    return next((one for one in above[1:] if one.is_relative_to(root) and _can_hold(one)), None)


def _mounted() -> Path | None:
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, target, kind, *_ = line.split(" ")
        if kind == "cgroup2":
            return Path(target)
    return None


def _own() -> str | None:
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    return next((line[3:] for line in lines if line.startswith("0::")), None)


def _can_hold(folder: Path) -> bool:
    try:
        shared = set((folder / "cgroup.subtree_control").read_text(encoding="ascii").split())
    except OSError:
        return False
    return shared >= NEEDED and os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)


class SandboxCgroup:
    """The cgroup of one sandbox, from `make` to `remove`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.members = folder / "cgroup.procs"

    @classmethod
    def make(cls, parent: Path, limits: SandboxLimits) -> Self:
        sweep(parent)
        folder = parent / f"{NAME}-{os.getpid()}-{next(_numbers)}"
        folder.mkdir()
        made = cls(folder)
        try:
            made._set("memory.max", str(limits.memory_bytes + limits.disk_bytes))
            made._set("memory.swap.max", "0")
            made._set("pids.max", str(limits.processes))
            made._set("cpu.max", f"{round(limits.cpus * PERIOD_US)} {PERIOD_US}")
        except BaseException:
            made.remove()
            raise
        return made

    def _set(self, name: str, value: str) -> None:
        file = self._folder / name
        if file.exists():  # swap and cpu may be without a controller
            file.write_text(value, encoding="ascii")

    @property
    def limits_cpus(self) -> bool:
        return (self._folder / "cpu.max").exists()

    def remove(self) -> None:
        """Call it when the processes have ended; what cannot be removed is swept later."""
        with contextlib.suppress(OSError):
            self._folder.rmdir()


def sweep(parent: Path) -> None:
    """Removes cgroups of owners that have ended."""
    for folder in parent.glob(f"{NAME}-*"):
        owner = folder.name.removeprefix(f"{NAME}-").split("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            SandboxCgroup(folder).remove()
