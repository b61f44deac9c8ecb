"""Delivery acknowledgements: which answers have reached the players of episodes.

A server may die in between. The player asks again, and what it never saw must not be trained on as if it had.

Owns: recording that an answer was delivered. Never touches: what happens to one that was not (`broker.deliveries`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import structlog

from palestra.server.broker.model_calls import EpisodeCalls
from palestra.server.core.callers import AttemptRef
from palestra.store import Store
from palestra.store import traces as rows
from palestra.store.traces import TurnKey

log = structlog.get_logger()


class DeliveryAcks:
    """A turn is kept with a mark, in one transaction; the mark goes when the answer has gone out."""

    def __init__(self, store: Store, episodes: EpisodeCalls):
        self._store, self._episodes = store, episodes
        self._kept: dict[str, tuple[AttemptRef, Sequence[TurnKey]]] = {}
        """By response."""
        self._writing: set[asyncio.Task[None]] = set()

    def expect(self, response_id: str, attempt: AttemptRef, turns: Sequence[TurnKey]) -> None:
        self._kept[response_id] = attempt, turns

    def acknowledge(self, response_id: str) -> None:
        """All of it is with the system, or beyond. Not for an attempt that is over: what its trainer reads does not
        change any more. Begun at once, so it is on disk before an end that comes later."""
        attempt, turns = self._kept.pop(response_id, (None, ()))
        if attempt is None or not self._episodes.is_live(attempt):
            return
        task = asyncio.create_task(self._write(turns), name="delivery-ack")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    @contextmanager
    def delivering(self, response_id: str) -> Iterator[None]:
        """Around a stream: one that breaks off is not handed over any more."""
        try:
            yield
        finally:
            self.forget(response_id)

    def forget(self, response_id: str) -> None:
        """Nobody will ask for it any more; the mark stays."""
        self._kept.pop(response_id, None)

    async def _write(self, turns: Sequence[TurnKey]) -> None:
        try:
            await self._store.write(lambda conn: rows.note_answered(conn, turns))
        except Exception:
            log.exception("the delivery of an answer could not be stored; this matters only if it is requested again")
