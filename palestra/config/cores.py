"""Counts the CPU cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """The number of cores that this process may use: in a container or under taskset fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
