"""Runs coroutines for callers without an event loop: one loop in a thread, for all of them.

`asyncio.run` would not do: it needs that no loop runs here, and ends what the last call left open.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
"""Protects the creation of the loop."""
_loop: asyncio.AbstractEventLoop | None = None


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine and waits for it; if interrupted, it is cancelled."""
    future = asyncio.run_coroutine_threadsafe(work, _running_loop())
    try:
        return future.result()
    except BaseException:  # also at an interrupt: the work must not continue alone
        future.cancel()
        raise


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop  # noqa: PLW0603
    with _lock:
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="fleet-sync", daemon=True).start()
        return _loop
