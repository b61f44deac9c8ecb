"""Recovery after a restart: the journal's records go back to the models of the database, then come the snapshots.

State that neither of them has is reported as lost here.

Owns: recovery after a restart of server or worker. Never touches: later requests.
"""

from __future__ import annotations

from palestra.server.core.futures import LOADING, TrainFuture
from palestra.server.core.training.models import TrackedModel
from palestra.server.core.training.request_journal import (
    JournaledIdentity,
    JournaledRequest,
    JournaledResult,
    SettledNumbers,
    loaded_folder,
)
from palestra.server.core.training.requests import TrainingRequests
from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.store.journal.journal import Position
from palestra.types.engine import DropModel, Hello, ModelState, encode_message


class Recovery:
    def __init__(self, training: TrainingRequests):
        self.training = training

    # When a server starts

    def run(self) -> None:
        """Replays the journal. Records that belong to no model are released, except for models whose base is not served
        at present."""
        for position, record in self.training.ledger.recover():
            if record.model_id not in self.training.absent:
                self._take(position, record)
            elif isinstance(record, JournaledRequest) and record.kind in LOADING:
                folder = loaded_folder(record.message)
                self.training.absent_folders |= {folder} if folder else set()
        for future in self.training.futures.values():
            model = self.training.models.get(future.model_id)
            if model is None and not future.is_done:
                self.training.fail(future, self.training.lost.message(future.model_id) or "the model was unloaded")
            if model is None or (future.seq_id <= model.snapshot_seq and future.result_at is not None):
                self.training.ledger.release_request(future)
        acknowledged = self.training.acknowledged
        acknowledged.forget_all_but(self.training.absent | self.training.models.keys())
        for model in self.training.models.values():
            answered = (future.seq_id for future in model.futures.values() if future.result_at is not None)
            model.find_missing(max(acknowledged.last(model.model_id), *answered, -1))
            self.training.advance(model)

    def _take(self, position: Position, record: JournaledRequest | JournaledResult | SettledNumbers) -> None:
        match record:
            case JournaledRequest():
                future = self._future(record)
                if future.request_at is not None:
                    self.training.ledger.release(position)
                else:
                    future.request_at = position
            case JournaledResult():
                future = self._future(record)
                if future.is_done:
                    self.training.ledger.release_result(position)
                else:
                    future.finish(None, record.at)
                    future.result_at, future.is_finishing, future.is_failed = position, True, record.failed
            case SettledNumbers():
                self._settled(position, record)

    def _future(self, record: JournaledIdentity) -> TrainFuture:
        """Returns the future of a request or result: a request may be deleted while its result is not, because a
        snapshot covers it."""
        future = self.training.futures.get(record.request_id)
        if future is None:
            future = record.as_future()
            model = self.training.models.get(record.model_id)
            if model is None:
                self.training.futures[future.request_id] = future
            else:
                self.training.place(model, future)
        return future

    def _settled(self, position: Position, record: SettledNumbers) -> None:
        model, last = self.training.models.get(record.model_id), max(record.seq_ids, default=-1)
        if model is None or last <= model.snapshot_seq:
            self.training.ledger.release(position)
        else:
            model.settled_at.append((last, position))
            model.settled.update(n for n in record.seq_ids if n >= model.next_seq)

    # When a worker starts

    def on_hello(self, worker: WorkerSupervisor, hello: Hello) -> None:
        training = self.training
        states = {state.model_id: state for state in hello.models}
        for model_id in states.keys() - training.models.keys():
            worker.link.send(DropModel(model_id=model_id))
        unstored = {message.request_id for message in hello.unstored}
        dispatcher, mine = training.dispatcher(worker), [m for m in training.models.values() if m.worker is worker]
        for model in mine:  # all of them before anything is sent
            dispatcher.meet(model, states.get(model.model_id, _nothing_of(model.model_id)).received_seq)
        for model in mine:
            self._meet(model, states.get(model.model_id, _nothing_of(model.model_id)), unstored)
        for message in hello.unstored:
            training.on_trained(worker, message, encode_message(message))
        dispatcher.dispatch()

    def _meet(self, model: TrackedModel, state: ModelState, unstored: set[str]) -> None:
        why = model.why_lost(state.received_seq)
        if why is not None:
            self.training.lose(model, why)
            return
        self.training.cover(model, state.covered_seq)
        for future in model.futures.values():
            is_open = not (future.is_done or future.is_finishing)
            if is_open and future.seq_id <= state.applied_seq and future.request_id not in unstored:
                self.training.lose_result(future)  # the worker deleted it when it was on disk here


def _nothing_of(model_id: str) -> ModelState:
    return ModelState(model_id=model_id, received_seq=-1, applied_seq=-1, covered_seq=-1)
