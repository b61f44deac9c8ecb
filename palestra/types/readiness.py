"""Records made ready for threads.

msgspec (0.22 at least) learns what a record looks like when it is first decoded, and where two threads do that at the
same time, the process dies (SIGSEGV). Modules whose records are decoded by threads let it learn them when they are
imported.
"""

from __future__ import annotations

import sys

import msgspec


def make_ready(module: str) -> None:
    """Prepares all records of a module for threads: call `make_ready(__name__)` after the last record."""
    for kind in list(vars(sys.modules[module]).values()):
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module:
            msgspec.json.Decoder(kind)
