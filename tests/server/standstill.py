"""An engine that computes nothing for a while, so that what is sent to it waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil


@contextmanager
def standstill(server: Any) -> Iterator[None]:
    """The engine computes nothing meanwhile: what is sent waits."""
    worker = psutil.Process(server.worker_pid)
    worker.suspend()
    try:
        yield
    finally:
        worker.resume()
