"""Group commit's queue: callers put, one thread takes everything there is."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class GroupQueue(Generic[T]):
    """Once closed, `put` answers False, and `take` hands out what is left and then nothing."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._closing = threading.Lock()  # nothing may be put behind the end mark
        self._closed = False

    def put(self, item: T) -> bool:
        with self._closing:
            if not self._closed:
                self._queue.put(item)
            return not self._closed

    def take(self) -> list[T]:
        """Blocks until there is something. Empty: closed, and all was handed out."""
        group: list[T] = []
        while (item := self._queue.get()) is not None:
            group.append(item)
            if self._queue.empty():  # nobody else takes
                return group
        self._queue.put(None)  # the end mark, for the next call
        return group

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
