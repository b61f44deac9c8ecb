"""Decides which rows of a file make up which batch: a function of the seed and a position."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Generic, TypeVar

from msgspec import Struct

from palestra.data.errors import DatasetError

T = TypeVar("T")


class Shuffle:
    """`shuffle[i]` is a row index, for any i from 0. Each epoch has every row once, in its own order."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._epoch = -1
        self._order: list[int] = []

    def __getitem__(self, position: int) -> int:
        epoch, place = divmod(position, self._count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(self._count))
            random.Random(f"data/{self._seed}/{epoch}").shuffle(self._order)
        return self._order[place]


class DrawnRows(Struct, Generic[T]):
    items: list[T]
    skipped: int
    """Number of rows that were skipped."""
    position: int
    """Position where the next batch begins."""


class DataOrder(Generic[T]):
    """The order of rows. To continue after a restart, call `draw` with the position where the last batch ended."""

    def __init__(self, count: int, seed: int, read: Callable[[int], T | None]) -> None:
        """`read` returns a row that is ready to be trained on, or None if there is nothing to learn in it."""
        self._count, self._read = count, read
        self._shuffle = Shuffle(count, seed)

    def draw(self, position: int, size: int) -> DrawnRows[T]:
        """Returns `size` rows from the position on. Raises DatasetError if there is nothing to learn in any row."""
        items: list[T] = []
        begin, barren = position, 0
        while len(items) < size:
            item = self._read(self._shuffle[position])
            position += 1
            if item is not None:
                items.append(item)
                barren = 0
                continue
            barren += 1
            if barren >= 2 * self._count:  # wherever it began, this covers a whole epoch
                raise DatasetError(
                    f"none of {self._count} rows has text of the assistant within max_sequence_length; "
                    "raise it, or check the data"
                )
        return DrawnRows(items, position - begin - size, position)
