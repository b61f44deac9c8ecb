"""Modules that programs may import in a process that can only compute: they must be loaded before the process closes.

It imports the standard library only.
"""

from __future__ import annotations

import importlib
import threading

IMPORTABLE = """
    abc array bisect calendar cmath collections collections.abc copy dataclasses datetime decimal enum fractions
    functools hashlib heapq io itertools json math numbers operator queue random re statistics string struct sys
    textwrap threading time types typing unicodedata zlib
"""
"""Modules that a program may import."""


def preload() -> None:
    for name in IMPORTABLE.split():
        importlib.import_module(name)


def run_threads_at_once() -> None:
    """Runs threads at once when they are started: programs start `main` in a thread to get a larger stack, but no
    thread can be started in the sandbox."""
    threading.Thread.start = threading.Thread.run
    threading.Thread.join = lambda self, timeout=None: None
