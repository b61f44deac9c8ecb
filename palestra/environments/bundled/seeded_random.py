"""Random choices for tasks that are the same everywhere and for ever.

Python's own `random` may change its choices with a version; the meaning of a task's id should not change.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class SeededRandom:
    """Works like a random generator that is seeded with a text."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._count = 0

    def below(self, bound: int) -> int:
        digest = hashlib.blake2b(f"{self._seed}/{self._count}".encode(), digest_size=8).digest()
        self._count += 1
        return int.from_bytes(digest, "big") % bound

    def between(self, low: int, high: int) -> int:
        """Returns a number between both, inclusive."""
        return low + self.below(high - low + 1)

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def sample(self, choices: Sequence[T], count: int) -> list[T]:
        """Returns different choices, in random order."""
        left = list(choices)
        return [left.pop(self.below(len(left))) for _ in range(count)]


# Digits that are not part of a decimal fraction; a minus counts if it cannot be the operator of "10-5". The quantifiers
# are possessive, so that a reply of nothing but digits takes linear time.
INTEGER = re.compile(r"(?:(?<!\w)-)?(?<![0-9])(?<![0-9]\.)[0-9]++(?!\.[0-9])")
MAX_DIGITS = 18  # a longer number is never an answer here, and Python refuses to parse thousands of digits


def last_integer(text: str) -> int | None:
    """Returns the last whole number in `text`; None if there is none, or it is absurdly long."""
    found = INTEGER.findall(text)
    return int(found[-1]) if found and len(found[-1]) <= MAX_DIGITS else None
