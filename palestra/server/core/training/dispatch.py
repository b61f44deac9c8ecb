"""Sends training requests to one worker: all at once or, if it keeps dying, one at a time (quarantine).

A request that kills the worker is sent to the next one too, and kills it. So a request that was the first of its model
in the worker at `SUSPECT_DEATHS` deaths is a suspect, and while there are suspects the worker is quarantined: only
their models' requests are sent, one at a time, without any sample. A request that was alone at `GIVE_UP_DEATHS` deaths
in a row is the cause.

Owns: what the living worker was sent and has not answered. Never touches: results, samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from palestra.server.core.futures import TrainFuture
from palestra.server.core.training.models import TrackedModel
from palestra.server.core.training.request_journal import RequestJournal
from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.types.engine import OwnModel, Skip, Train, encode_message

SUSPECT_DEATHS = 2  # one death may have any cause; a quarantine only costs time, so it need not be certain
# in addition to those, and alone each time: kills from outside would not always hit the same request
GIVE_UP_DEATHS = 3


class WorkerDispatcher:
    def __init__(
        self,
        worker: WorkerSupervisor,
        ledger: RequestJournal,
        models: Mapping[str, TrackedModel],
        on_lifted: Callable[[WorkerSupervisor], None],
    ):
        self.worker = worker
        self.is_quarantined = False
        self._ledger, self._models, self._on_lifted = ledger, models, on_lifted
        self._in_flight: dict[str, TrainFuture] = {}
        """Requests in flight, oldest first."""
        self._deaths: dict[TrainFuture, int] = {}
        """At how many deaths a request was the first of its model; until its result arrives."""
        self._blamed: TrainFuture | None = None
        self._blamed_times = 0
        self._owned: set[str] = set()
        """Models whose owner the worker knows."""

    # To the worker

    def dispatch(self, model: TrackedModel | None = None) -> None:
        """Sends what may be sent, of this model or of all."""
        if not self.worker.link.is_up:
            return
        if self.is_quarantined:
            self._dispatch_one()
            return
        for one in [model] if model else self._mine():
            while (future := self._next(one)) is not None:
                self._send(one, future)

    def _dispatch_one(self) -> None:
        for suspect in self._suspects():
            if self._in_flight:
                return
            model = self._models.get(suspect.model_id)
            future = self._next(model) if model else None
            if model and future and future.seq_id <= suspect.seq_id:
                self._send(model, future)
            else:  # a snapshot contained its effect after all
                del self._deaths[suspect]
        if not self._suspects():
            self.is_quarantined = False
            self.dispatch()
            self._on_lifted(self.worker)

    def _next(self, model: TrackedModel) -> TrainFuture | None:
        while model.sent_seq + 1 < model.next_seq:
            future = model.futures.get(model.sent_seq + 1)
            if future is not None and future.request_at is not None:
                return future
            model.sent_seq += 1  # given up, or in a snapshot
        return None

    def _send(self, model: TrackedModel, future: TrainFuture) -> None:
        if model.model_id not in self._owned:
            self._owned.add(model.model_id)
            self.worker.link.send(OwnModel(model_id=model.model_id, owner=model.owner))
        self.worker.link.send_encoded(self._message(future))
        self._in_flight[future.request_id] = future
        model.sent_seq = future.seq_id

    def _message(self, future: TrainFuture) -> bytes:
        if not future.is_failed:
            return future.message or self._ledger.message_of(future)
        # Its client was told that it failed: it must not succeed now, nor kill the worker again.
        return encode_message(
            Train(request_id=future.request_id, model_id=future.model_id, seq_id=future.seq_id, operation=Skip())
        )

    def _mine(self) -> list[TrackedModel]:
        return [model for model in self._models.values() if model.worker is self.worker]

    def _suspects(self) -> list[TrainFuture]:
        return [future for future, deaths in self._deaths.items() if deaths >= SUSPECT_DEATHS]

    # From the worker

    def meet(self, model: TrackedModel, received_seq: int) -> None:
        """Takes note of what the worker has: the rest is to be sent."""
        model.sent_seq = received_seq
        self._owned.discard(model.model_id)
        for future in model.futures.values():
            if future.seq_id > received_seq:
                self._in_flight.pop(future.request_id, None)
            elif not future.is_done and future.request_at is not None:
                self._in_flight.setdefault(future.request_id, future)

    def landed(self, request_id: str) -> None:
        """Notes that a result has arrived."""
        future = self._in_flight.pop(request_id, None)
        if future is not None:
            self._clear(future)

    def drop(self, model: TrackedModel) -> None:
        self._owned.discard(model.model_id)
        for future in model.futures.values():
            self._in_flight.pop(future.request_id, None)
            self._clear(future)

    def on_exit(self, *, is_blameless: bool = False) -> TrainFuture | None:
        """Called when the worker has died; returns the request that is the cause, if that is certain by now.
        `is_blameless`: it was asked to end, and no request is the cause."""
        heads = list({future.model_id: future for future in reversed(self._in_flight.values())}.values())
        self._in_flight.clear()
        if is_blameless:
            return None
        for head in heads:
            self._deaths[head] = self._deaths.get(head, 0) + 1
        if self.is_quarantined and len(heads) == 1:
            self._blamed_times = self._blamed_times + 1 if heads[0] is self._blamed else 1
            self._blamed = heads[0]
        self.is_quarantined = bool(self._suspects())
        guilty = self._blamed if self._blamed_times >= GIVE_UP_DEATHS else None
        if guilty is not None:
            self._clear(guilty)
        return guilty

    def _clear(self, future: TrainFuture) -> None:
        self._deaths.pop(future, None)
        if future is self._blamed:
            self._blamed, self._blamed_times = None, 0
        if self.is_quarantined:
            self.dispatch()
