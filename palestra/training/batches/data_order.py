"""Which rows of a file make up which batch: a function of the seed and a position.

Owns: shuffling for each epoch, skipping rows with nothing to train on. Never touches: the content of rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Generic, TypeVar

from msgspec import Struct

from palestra.training.batches.conversation_files import DatasetError

T = TypeVar("T")


class Shuffle:
    """`shuffle[i]` for any i from 0: a row. Each pass has every row once, in an order of its own."""

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
    """Rows passed over."""
    position: int
    """Where the next batch begins."""


class DataOrder(Generic[T]):
    """To go on after a restart is to draw from the position where the last batch ended."""

    def __init__(self, count: int, seed: int, read: Callable[[int], T | None]) -> None:
        """`read`: a row, ready to be trained on; None where it teaches nothing."""
        self._count, self._read = count, read
        self._shuffle = Shuffle(count, seed)

    def draw(self, position: int, size: int) -> DrawnRows[T]:
        """Raises DataError where no row teaches anything."""
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
            if barren >= 2 * self._count:  # however it began, a whole pass is among them
                raise DatasetError(
                    f"none of {self._count} rows has text of the assistant within max_sequence_length; "
                    "raise it, or check the data"
                )
        return DrawnRows(items, position - begin - size, position)
