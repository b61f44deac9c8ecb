"""Finds tags in a text that is still being generated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FoundTag:
    tag: str | None
    start: int
    """Where the tag begins; if there is none, where something begins that may become one."""


class Tags:
    def __init__(self, texts: Sequence[str]):
        # If two tags begin alike, the shorter one wins, because it is complete first.
        shortest = [text for text in texts if not any(text != other and text.startswith(other) for other in texts)]
        self._pattern = re.compile("|".join(map(re.escape, shortest)) or r"(?!)")
        self._beginnings = tuple({text[:length] for text in shortest for length in range(1, len(text))})

    def find(self, text: str, at_end: bool) -> FoundTag:
        """Finds the first tag. `at_end`: nothing follows `text`."""
        found = self._pattern.search(text)
        open_from = len(text) if at_end else self._open_from(text)
        if found is not None and found.start() < open_from:
            return FoundTag(found.group(), found.start())
        return FoundTag(None, open_from)

    def _open_from(self, text: str) -> int:
        if not text.endswith(self._beginnings):
            return len(text)
        return len(text) - max(len(beginning) for beginning in self._beginnings if text.endswith(beginning))
