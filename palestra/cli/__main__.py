"""The `palestra` program: `main`, in a process of its own."""

from __future__ import annotations

import atexit
import gc
import sys

from palestra.cli.app import main

GARBAGE_AFTER = 100_000
"""Number of new objects before the garbage collector runs. Imports of a command make that many, and hold no garbage:
Python's default of 700 takes a tenth of a command's start."""


def run() -> None:
    gc.set_threshold(GARBAGE_AFTER)
    atexit.register(_skip_last_collection)
    main()


def _skip_last_collection() -> None:
    """Ends the process without a last search for garbage: the memory goes with it. Triton's library would then report
    all that was not freed, thirty lines of it (transformers loads it, in `checkpoint export --check`)."""
    if "triton" not in sys.modules:
        gc.freeze()


if __name__ == "__main__":
    run()
