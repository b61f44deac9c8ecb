"""Round robin among owners, and then among what each owner has waiting.

An owner with a hundred models is served as often as an owner with one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Generic, TypeVar

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """Items that wait, by owner and name. A new one goes to the end of its owner's line, a new owner to the end of the
    owners."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, T]] = {}
        """The lines of the owners that have one, each in the order of turns."""

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[T]:
        """Yields all items as if each got a turn now: the first of every owner, then the second of every owner …"""
        missing = object()
        rounds = zip_longest(*(line.values() for line in self._lines.values()), fillvalue=missing)
        return (item for item in chain.from_iterable(rounds) if item is not missing)  # type: ignore[misc]

    @property
    def owners(self) -> list[str]:
        """Owners with something that waits, whose turn is next first."""
        return list(self._lines)

    def get(self, owner: str, name: str) -> T | None:
        return self._lines.get(owner, {}).get(name)

    def add(self, owner: str, name: str, item: T) -> T:
        """Adds an item; one that waits already keeps its place. Returns the one that waits."""
        return self._lines.setdefault(owner, {}).setdefault(name, item)

    def remove(self, owner: str, name: str) -> None:
        line = self._lines.get(owner, {})
        line.pop(name, None)
        if not line:
            self._lines.pop(owner, None)

    def first(self, owner: str | None = None) -> tuple[str, str, T]:
        """Returns owner, name and item whose turn is next, of all or of one owner."""
        owner = next(iter(self._lines)) if owner is None else owner
        return owner, *next(iter(self._lines[owner].items()))

    def owner_served(self, owner: str) -> None:
        """Moves an owner behind the others; the order of its own line stays."""
        if owner in self._lines:
            self._lines[owner] = self._lines.pop(owner)

    def served(self, owner: str, name: str) -> None:
        """Moves an item to the end of its owner's line; the order of owners stays."""
        line = self._lines.get(owner, {})
        if name in line:
            line[name] = line.pop(name)
