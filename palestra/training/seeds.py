"""Seeds that depend only on their purpose, not on the order of play, the process or its restarts."""

from __future__ import annotations

import hashlib

SEED_BITS = 63  # the Tinker API takes signed 64-bit seeds


def derive_seed(*parts: str | int) -> int:
    """Returns the same seed for the same parts, for ever. "1" and 1 are different parts, and so are ("ab", "c") and
    ("a", "bc")."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{type(part).__name__}:{part}".encode(errors="surrogatepass")
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little") >> (64 - SEED_BITS)
