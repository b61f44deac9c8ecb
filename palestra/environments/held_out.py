"""Chooses tasks for evaluation where their source has no split, by each task's own text.

So a task is on the same side in every run, whatever the seed, and equal tasks are never on both.
"""

from __future__ import annotations

import hashlib

HELD_OUT = 8
"""One of this many tasks is kept for evaluation."""


def is_held_out(text: str) -> bool:
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT == 0
