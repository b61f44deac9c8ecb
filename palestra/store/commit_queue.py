"""The queue of the group commit: callers put jobs in, and one thread takes all that are there."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class GroupQueue(Generic[T]):
    """A queue that can be closed. Afterwards `put` returns False, and `take` returns what is left, and then nothing."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._closing = threading.Lock()  # protects the end mark: nothing may be put behind it
        self._closed = False

    def put(self, item: T) -> bool:
        with self._closing:
            if not self._closed:
                self._queue.put(item)
            return not self._closed

    def take(self) -> list[T]:
        """Waits until there is a job and returns all of them. An empty list means that the queue is closed and
        empty."""
        group: list[T] = []
        while (item := self._queue.get()) is not None:
            group.append(item)
            if self._queue.empty():  # safe to test: this is the only reader of the queue
                return group
        self._queue.put(None)  # keep the end mark for the next call
        return group

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
