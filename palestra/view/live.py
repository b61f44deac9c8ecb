"""Streams what a run writes, as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from palestra.runs.reader import RunReader, RunStatus
from palestra.runs.record_files import RunError, read_added

LOOK_EVERY_S = 0.5
LOOK_SELDOM_S = 3.0  # at a run that has ended: it may be resumed
SILENCE_S = 15.0  # proxies close a connection on which nothing comes


async def _always() -> bool:
    return True


def _never() -> bool:
    return False


async def pause(seconds: float, is_stopping: Callable[[], bool]) -> None:
    """Waits, unless the server stops: it waits for its streams to end."""
    end = time.monotonic() + seconds
    while not is_stopping() and (left := end - time.monotonic()) > 0:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(min(left, LOOK_EVERY_S))


async def follow(
    run: RunReader,
    position: int,
    is_admitted: Callable[[], Awaitable[bool]] = _always,
    is_stopping: Callable[[], bool] = _never,
) -> AsyncIterator[bytes]:
    """Events `metrics` (a row as it was written), `state` (its status) and `gone` (the run was deleted). The id of an
    event is the place in the file behind it, where a stream that broke goes on. It ends when its reader may look no
    longer, as after a key was revoked, and when the server stops."""
    status: RunStatus | None = None
    quiet_s = 0.0
    yield b"retry: 2000\n\n"
    while not is_stopping() and await is_admitted():
        before = position
        try:
            now, rows, position = await asyncio.to_thread(_look, run, position)
        except (RunError, OSError):
            yield _event("gone", {"run": run.name}, position)
            return
        if now is not status:
            status = now
            yield _event("state", {"status": now}, before)
            quiet_s = 0.0
        for number, row in enumerate(rows, 1):  # only the last one is behind all of them
            yield _event("metrics", row, position if number == len(rows) else before)
            quiet_s = 0.0
        if quiet_s >= SILENCE_S:
            yield b": still here\n\n"
            quiet_s = 0.0
        wait_s = LOOK_EVERY_S if status is RunStatus.RUNNING else LOOK_SELDOM_S
        quiet_s += wait_s
        await pause(wait_s, is_stopping)


def _look(run: RunReader, position: int) -> tuple[RunStatus, list[dict[str, object]], int]:
    if not run.config_file.is_file():
        raise RunError(f"{run.path} is gone")
    status = run.status()  # before the rows: the last ones are read before the end is reported
    size = run.metrics_file.stat().st_size if run.metrics_file.is_file() else 0
    if size == position:
        return status, [], position
    rows, position = read_added(run.metrics_file, min(position, size))
    return status, rows, position


def _event(kind: str, content: object, position: int) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (position, kind.encode(), msgspec.json.encode(content))
