"""Tasks that are made when they are looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

from palestra.types.rollouts import Task

K = TypeVar("K")


class LazyTasks(Sequence[Task], Generic[K]):
    def __init__(self, keys: Sequence[K], make: Callable[[K], Task]) -> None:
        self._keys, self._make = keys, make

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return LazyTasks(self._keys[index], self._make)
        return self._make(self._keys[index])
