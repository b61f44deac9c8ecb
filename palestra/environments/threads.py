"""Threads for calls that may hang.

`ThreadPoolExecutor` joins its threads when the interpreter ends, so one environment that never returns would keep a
finished run from ending; and each such call would take a thread from the others for good. Here a running call that is
cancelled keeps its thread, which is not waited for, and a new thread takes its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _Call(Future[Any]):
    def __init__(self, work: Callable[[], Any], abandon: Callable[[_Call], None]) -> None:
        super().__init__()
        self.work = work
        self.abandon = abandon
        self.thread: threading.Thread | None = None
        self.is_abandoned = False
        self.is_finished = False

    def cancel(self) -> bool:
        """Cancels the call like any future; a running one continues, but its thread no longer counts."""
        is_cancelled = super().cancel()
        if not is_cancelled and self.running():
            self.abandon(self)
        return is_cancelled

    def run(self) -> None:
        try:
            result = self.work()
        except BaseException as error:  # also SystemExit: it belongs to the call, not to the thread
            self.set_exception(error)
        else:
            self.set_result(result)


class CallThreads(Executor):
    """Runs at most `size` calls at once, not counting abandoned ones."""

    def __init__(self, size: int, name: str = "palestra-env") -> None:
        self._size = size
        self._name = name
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()  # protects all fields below and what a call knows about its thread
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the threads are closed and take no more calls")
            call = _Call(partial(fn, *args, **kwargs), self._abandon)
            self._queue.put(call)
            if len(self._threads) < self._size:
                self._start_thread()
        return call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._is_closed = True
            threads = list(self._threads)
        if cancel_futures:
            self._cancel_queued()
        for _ in threads:
            self._queue.put(None)
        if wait:
            for thread in threads:
                thread.join()

    def _cancel_queued(self) -> None:
        while True:
            try:
                call = self._queue.get_nowait()
            except Empty:
                return
            if call is not None:
                call.cancel()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            call.thread = threading.current_thread()
            if call.set_running_or_notify_cancel():
                call.run()
                with self._lock:
                    call.is_finished = True
                    if call.is_abandoned:
                        return  # another thread has taken this one's place

    def _abandon(self, call: _Call) -> None:
        with self._lock:
            if call.is_finished or call.is_abandoned:
                return
            call.is_abandoned = True
            if call.thread is not None:
                self._threads.discard(call.thread)
            self._start_thread()
