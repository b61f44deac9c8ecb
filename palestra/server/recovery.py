"""After a restart: the journal's records back into the models the database knows."""

from __future__ import annotations

from palestra.server.futures import TrainFuture
from palestra.server.ledger import Finished, Requested, Settled
from palestra.server.tinker.paths import TrainRequestId, parse_request_id
from palestra.server.training import Training
from palestra.store.journal import Position


class Recovery:
    def __init__(self, training: Training):
        self.training = training

    def run(self) -> None:
        """Reads the journal into the models that are registered; what belongs to no model is let go."""
        for position, record in self.training.ledger.recover():
            match record:
                case Requested():
                    self._recover_request(position, record)
                case Finished():
                    self._recover_result(position, record)
                case Settled():
                    self._recover_settled(position, record)
        for future in self.training.futures.values():
            if not future.is_done and future.model_id not in self.training.models:
                self.training.fail(future, "the model was unloaded")
        for model in self.training.models.values():
            self.training.advance(model)

    def _recover_request(self, position: Position, record: Requested) -> None:
        future = TrainFuture(
            record.request_id,
            record.owner,
            record.digest,
            model_id=record.model_id,
            seq_id=record.seq_id,
            kind=record.kind,
            reply=record.reply,
            request_at=position,
        )
        if record.model_id in self.training.absent:
            return
        model = self.training.models.get(record.model_id)
        if model is None or record.seq_id <= model.snapshot_seq:
            self.training.ledger.release_request(future)
        if model is None:
            self.training.futures[future.request_id] = future
        else:
            self.training.place(model, future)

    def _recover_result(self, position: Position, record: Finished) -> None:
        future = self.training.futures.get(record.request_id)
        if future is None or future.is_done:
            if not self._is_absent(record.request_id):
                self.training.ledger.release(position)
            return
        future.finish(None, record.at)
        future.result_at, future.is_finishing = position, True

    def _is_absent(self, request_id: str) -> bool:
        named = parse_request_id(request_id)
        return isinstance(named, TrainRequestId) and named.model_id in self.training.absent

    def _recover_settled(self, position: Position, record: Settled) -> None:
        if record.model_id in self.training.absent:
            return
        model, last = self.training.models.get(record.model_id), max(record.seq_ids, default=-1)
        if model is None or last <= model.snapshot_seq:
            self.training.ledger.release(position)
        else:
            model.settled_at.append((last, position))
            model.settled.update(n for n in record.seq_ids if n >= model.next_seq)
