"""Delivery acknowledgements: which answers have reached the players of episodes.

A server may die before an answer is sent. The player then asks again, and the answer that it never received must not be
trained on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import structlog

from palestra.server.broker.model_calls import EpisodeCalls
from palestra.server.core.owners.callers import AttemptRef
from palestra.store import Store
from palestra.store.queries import traces as rows
from palestra.store.queries.traces import TurnKey

log = structlog.get_logger()


class DeliveryAcks:
    """A turn is stored as unanswered, in one transaction; the mark is deleted when the answer was sent."""

    def __init__(self, store: Store, episodes: EpisodeCalls):
        self._store, self._episodes = store, episodes
        self._kept: dict[str, tuple[AttemptRef, Sequence[TurnKey]]] = {}
        """Turns by response id."""
        self._writing: set[asyncio.Task[None]] = set()

    def expect(self, response_id: str, attempt: AttemptRef, turns: Sequence[TurnKey]) -> None:
        self._kept[response_id] = attempt, turns

    def acknowledge(self, response_id: str) -> None:
        """Notes that the whole answer was handed to the operating system. Does nothing if the attempt is over, because
        its trainer may have read it. The write begins at once, so it is on disk before a later end of the episode."""
        attempt, turns = self._kept.pop(response_id, (None, ()))
        if attempt is None or not self._episodes.is_live(attempt):
            return
        task = asyncio.create_task(self._write(turns), name="delivery-ack")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    @contextmanager
    def delivering(self, response_id: str) -> Iterator[None]:
        """Surrounds a stream: if it breaks off, its answer is not acknowledged."""
        try:
            yield
        finally:
            self.forget(response_id)

    def forget(self, response_id: str) -> None:
        """Forgets a response that its client will not ask for any more; the mark stays."""
        self._kept.pop(response_id, None)

    async def _write(self, turns: Sequence[TurnKey]) -> None:
        try:
            await self._store.write(lambda conn: rows.note_answered(conn, turns))
        except Exception:
            log.exception("the delivery of an answer could not be stored; this matters only if it is requested again")
