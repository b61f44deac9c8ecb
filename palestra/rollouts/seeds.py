"""Seeds that depend only on their purpose, not on the order of play, the process or its restarts.

Everything random in a run comes from names and positions by `derive_seed`, never from a shared generator: a resumed run
must draw the same.
"""

from __future__ import annotations

import hashlib

from palestra.types.sampling import sample_seed

SEED_BITS = 63  # the Tinker API takes signed 64-bit seeds


def derive_seed(*parts: str | int) -> int:
    """Returns the same seed for the same parts, for ever. "1" and 1 are different parts, and so are ("ab", "c") and
    ("a", "bc")."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{type(part).__name__}:{part}".encode(errors="surrogatepass")
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little") >> (64 - SEED_BITS)


def group_seeds(count: int, *parts: str | int) -> tuple[int, ...]:
    """Returns the seeds of a group's rollouts. Their first turns are the samples of one request with the first seed,
    or of one request each: the tokens are the same."""
    return more_seeds((derive_seed(*parts),), count - 1)


def more_seeds(seeds: tuple[int, ...], extra: int) -> tuple[int, ...]:
    """The seeds of a group, with those of further rollouts."""
    return (*seeds, *(sample_seed(seeds[0], index) for index in range(len(seeds), len(seeds) + extra)))


def turn_seed(rollout_seed: int, turn: int) -> int:
    return derive_seed(rollout_seed, turn) if turn else rollout_seed
