"""The memory limit where there is no cgroup: a thread that counts what a sandbox's processes hold, and kills.

A sandbox is looked at again before it could have filled what it may still use, so that it can exceed its limit only by
what it takes between two looks close to it.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

RESIDENT = {"status": (b"VmRSS", b"VmSwap", b"VmPTE")}
PROPORTIONAL = {"smaps_rollup": (b"Pss", b"SwapPss"), "status": (b"VmPTE",)}
"""What counts, by file of a process in /proc; page tables, too: of pages that were only read, there is nothing else."""
FILL_BYTES_PER_S = 4 * 1024**3  # faster than a core takes memory from the kernel
SOONEST_S, LATEST_S = 0.01, 1.0
TOO_FAR = 1.25
"""The whole sandbox ends when it holds this many times its limit: it grows faster than processes are killed."""


@dataclass(slots=True)
class WatchedSandbox:
    processes: int
    """A descriptor of the sandbox's own /proc, where only its processes are."""
    first: int
    """The pidfd of its process 1."""
    limit_bytes: int
    why_ended: str | None = None
    is_over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the descriptors are used, so that they are not closed meanwhile."""

    def forget(self) -> None:
        with self.lock:
            self.is_over = True


class MemoryWatchdog:
    """One thread for all sandboxes of this process."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, WatchedSandbox]] = []
        self._changed = threading.Condition()  # protects the heap and the number
        self._number = 0
        self._thread: threading.Thread | None = None

    def watch(self, sandbox: WatchedSandbox) -> None:
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="sandbox memory", daemon=True)
                self._thread.start()
            self._push(sandbox, 0.0)
            self._changed.notify()

    def _push(self, sandbox: WatchedSandbox, after_s: float) -> None:
        self._number += 1
        heapq.heappush(self._due, (time.monotonic() + after_s, self._number, sandbox))

    def _run(self) -> None:
        while True:
            sandbox = self._next()
            try:
                after_s = _looked_after(sandbox)
            except OSError as error:
                after_s = None
                _end(sandbox, f"the sandbox could not be watched and was ended: {error}")
            if after_s is not None:
                with self._changed:
                    self._push(sandbox, after_s)

    def _next(self) -> WatchedSandbox:
        with self._changed:
            while True:
                wait_s = self._due[0][0] - time.monotonic() if self._due else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(wait_s)


def _looked_after(sandbox: WatchedSandbox) -> float | None:
    """Kills where there is too much; returns when to look again."""
    with sandbox.lock:
        if sandbox.is_over:
            return None
        held = _held(sandbox.processes, RESIDENT)
        if sum(held.values()) > sandbox.limit_bytes:  # pages that processes share were counted for each
            held = _held(sandbox.processes, PROPORTIONAL)
        used = sum(held.values())
        if used > sandbox.limit_bytes:
            _kill(sandbox, used, held)
        return min(max((sandbox.limit_bytes - used) / FILL_BYTES_PER_S, SOONEST_S), LATEST_S)


def _held(processes: int, wanted: Mapping[str, tuple[bytes, ...]]) -> dict[str, int]:
    """Returns bytes by process."""
    found = {}
    for name in os.listdir(processes):
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                found[name] = sum(_bytes_in(_read(processes, f"{name}/{file}"), one) for file, one in wanted.items())
    return found


def _bytes_in(text: bytes, fields: tuple[bytes, ...]) -> int:
    """Lines are in KiB; a process that has just ended has none of them."""
    values = (text.partition(b"\n%s:" % field)[2].split(maxsplit=1) for field in fields)
    return sum(int(value[0]) for value in values if value) * 1024


def _read(folder: int, path: str) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def _kill(sandbox: WatchedSandbox, used: int, held: dict[str, int]) -> None:
    if used > TOO_FAR * sandbox.limit_bytes:
        _end(sandbox, f"the sandbox held {used >> 20} MiB of {sandbox.limit_bytes >> 20} MiB and was ended")
        return
    largest = max((name for name in held if name != "1"), key=lambda name: held[name], default="1")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        process = os.open(largest, os.O_RDONLY | os.O_DIRECTORY, dir_fd=sandbox.processes)
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def _end(sandbox: WatchedSandbox, why: str) -> None:
    sandbox.why_ended = why
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(sandbox.first, signal.SIGKILL)
