"""Made-up tasks that are the same everywhere and for ever.

Owns: numbers out of a text by hashing. Python's own `random` may change its choices with a version; a task's id should
not change its meaning.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """As a random generator, seeded with a text."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._count = 0

    def below(self, bound: int) -> int:
        digest = hashlib.blake2b(f"{self._seed}/{self._count}".encode(), digest_size=8).digest()
        self._count += 1
        return int.from_bytes(digest, "big") % bound

    def between(self, low: int, high: int) -> int:
        """Both included."""
        return low + self.below(high - low + 1)

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def sample(self, choices: Sequence[T], count: int) -> list[T]:
        """Different ones, in random order."""
        left = list(choices)
        return [left.pop(self.below(len(left))) for _ in range(count)]


# Digits that belong to no decimal fraction; a minus counts where it cannot be the operator of "10-5". Possessive, so
# that a reply of nothing but digits takes linear time.
INTEGER = re.compile(r"(?:(?<!\w)-)?(?<![0-9])(?<![0-9]\.)[0-9]++(?!\.[0-9])")
MAX_DIGITS = 18  # more is no answer to anything asked here, and Python refuses to read thousands


def last_integer(text: str) -> int | None:
    """The last whole number in `text`; None where there is none, or it is absurdly long."""
    found = INTEGER.findall(text)
    return int(found[-1]) if found and len(found[-1]) <= MAX_DIGITS else None
