"""Waiting claims: each is served in its turn, and none is woken without an episode for it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

A = TypeVar("A")
L = TypeVar("L")

Interest = tuple[str, ...]
"""What a claim would take: claims with the same interest can be served by the same episodes."""


class PassedOver:
    """There is nothing for this claim, though there may be something for those behind it."""


@dataclass(slots=True, eq=False)
class Waiter(Generic[A, L]):
    request: A
    interest: Interest
    name: tuple[str, ...]
    """A claim that is repeated under this name is the same claim."""
    number: int
    got: asyncio.Future[L] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    readers: int = 0


class WaitingClaims(Generic[A, L]):
    def __init__(self) -> None:
        self._lines: dict[Interest, OrderedDict[int, Waiter[A, L]]] = {}
        self._named: dict[tuple[str, ...], Waiter[A, L]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._named)

    def join(self, request: A, interest: Interest, name: tuple[str, ...]) -> Waiter[A, L]:
        """Adds a claim to the end of its line; a repeated claim keeps its place."""
        waiter = self._named.get(name)
        if waiter is None:
            waiter = self._named[name] = Waiter(request, interest, name, next(self._numbers))
            self._lines.setdefault(interest, OrderedDict())[waiter.number] = waiter
        waiter.readers += 1
        return waiter

    def begin_shutdown(self, waiter: Waiter[A, L]) -> None:
        waiter.readers -= 1
        if not waiter.readers:
            self._remove(waiter)

    def hand_out(
        self, take: Callable[[Waiter[A, L]], L | PassedOver | None], is_concerned: Callable[[str], bool]
    ) -> None:
        """Gives episodes to the claims that have waited longest, until `take` has nothing more for any line.
        `is_concerned` tests the first part of an interest."""
        lines = [iter(line.values()) for interest, line in self._lines.items() if is_concerned(interest[0])]
        heads = [(waiter.number, waiter, line) for line in lines for waiter in itertools.islice(line, 1)]
        heapq.heapify(heads)
        served: list[tuple[Waiter[A, L], L]] = []
        while heads:
            _, waiter, line = heapq.heappop(heads)
            got = take(waiter)
            if got is None:
                continue
            if not isinstance(got, PassedOver):
                served.append((waiter, got))
            if (after := next(line, None)) is not None:
                heapq.heappush(heads, (after.number, after, line))
        for waiter, got in served:
            self._remove(waiter)
            waiter.got.set_result(got)

    def _remove(self, waiter: Waiter[A, L]) -> None:
        if self._named.get(waiter.name) is not waiter:
            return
        del self._named[waiter.name]
        line = self._lines[waiter.interest]
        del line[waiter.number]
        if not line:
            del self._lines[waiter.interest]
