"""The `palestra` program: `main`, in a process of its own."""

from __future__ import annotations

import atexit
import gc

from palestra.cli.app import main

GARBAGE_AFTER = 100_000
"""Number of new objects before the garbage collector runs. Imports of a command make that many, and hold no garbage:
Python's default of 700 takes a tenth of a command's start."""


def run() -> None:
    gc.set_threshold(GARBAGE_AFTER)
    atexit.register(gc.freeze)  # no last search for garbage: the memory goes with the process
    main()


if __name__ == "__main__":
    run()
