"""The journal of training requests: requests, results and failures are on disk before anything depends on them.

Owns: the records and their format on disk. Never touches: order, workers.

A request goes to the worker only when the journal has it, and the journal forgets it only when the database knows the
snapshot that covers it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from palestra.server.core.futures import WITH_FOLDER, RequestKind, TrainFuture
from palestra.store import Journal
from palestra.store.journal.journal import Position
from palestra.types.engine import CreateModel, LoadWeights, SaveWeights, Train, decode_to_worker, encode_message
from palestra.util.json_types import JsonObject


class JournaledIdentity(Struct, frozen=True, kw_only=True):
    """Identifies a request. Both records of a request have all of it, because the other one may be deleted."""

    request_id: str
    model_id: str
    seq_id: int
    owner: str
    kind: RequestKind
    digest: bytes
    """A hash of the client's request: the same number with other content is refused."""
    reply: JsonObject
    """What the answer contains in addition to the worker's result, such as the path of a checkpoint."""

    def as_future(self) -> TrainFuture:
        return TrainFuture(
            self.request_id,
            self.owner,
            self.digest,
            model_id=self.model_id,
            seq_id=self.seq_id,
            kind=self.kind,
            reply=self.reply,
        )


class JournaledRequest(JournaledIdentity, frozen=True, kw_only=True, tag="requested"):
    message: bytes
    """The encoded `Train` message for the worker."""


class JournaledResult(JournaledIdentity, frozen=True, kw_only=True, tag="finished"):
    at: float
    frame: bytes
    """The `Trained` message as the worker sent it."""
    failed: bool = False
    """Whether it had no effect, and must have none when the model is replayed."""


class SettledNumbers(Struct, frozen=True, kw_only=True, tag="settled"):
    """Numbers that were given up or refused: requests with these numbers will never arrive."""

    model_id: str
    seq_ids: list[int]


Record = JournaledRequest | JournaledResult | SettledNumbers

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class RequestJournal:
    """Everything written is durable when the call returns, and stays until it is released.

    Requests and results have a journal each: requests are large and soon covered by snapshots, results are small and
    stay for an hour. In one file, results would keep requests from being deleted.
    """

    def __init__(self, requests: Journal, results: Journal, locate: Callable[[str], str]):
        """`locate` returns where the folder of a checkpoint is now."""
        self._requests, self._results, self._locate = requests, results, locate

    async def record_request(self, future: TrainFuture) -> Position:
        assert future.message is not None
        return await self._requests.append(_encode(JournaledRequest(**_about(future), message=future.message)))

    async def answer(self, future: TrainFuture, frame: bytes) -> Position:
        at = future.finished_at or time.time()
        record = JournaledResult(**_about(future), at=at, frame=frame, failed=future.is_failed)
        return await self._results.append(_encode(record))

    async def give_up(self, model_id: str, seq_ids: list[int]) -> Position:
        return await self._requests.append(_encode(SettledNumbers(model_id=model_id, seq_ids=seq_ids)))

    def message_of(self, future: TrainFuture) -> bytes:
        assert future.request_at is not None
        record = _decode(self._requests.read(future.request_at))
        assert isinstance(record, JournaledRequest)
        return self._located(record.message) if future.kind in WITH_FOLDER else record.message

    def _located(self, message: bytes) -> bytes:
        """Returns a message that reads or writes a checkpoint where it is now, or belongs now."""
        train = decode_to_worker(message)
        assert isinstance(train, Train)
        match train.operation:
            case LoadWeights(folder=folder) as load:
                operation = replace(load, folder=self._locate(folder))
            case SaveWeights(folder=folder) as save:
                operation = replace(save, folder=self._locate(folder))
            case CreateModel(load_from=str(folder)) as create:
                operation = replace(create, load_from=self._locate(folder))
            case _:
                return message
        return encode_message(replace(train, operation=operation))

    def folder_of(self, future: TrainFuture) -> str | None:
        """Returns the checkpoint folder that a request loads."""
        return loaded_folder(future.message or self.message_of(future))

    def frame_of(self, future: TrainFuture) -> bytes:
        assert future.result_at is not None
        record = _decode(self._results.read(future.result_at))
        assert isinstance(record, JournaledResult)
        return record.frame

    def release(self, position: Position | None) -> None:
        """Releases the record of a request, or of numbers that were given up."""
        if position is not None:
            self._requests.release(position)

    def release_request(self, future: TrainFuture) -> None:
        self.release(future.request_at)
        future.request_at = None

    def release_result(self, position: Position | None) -> None:
        if position is not None:
            self._results.release(position)

    def recover(self) -> Iterator[tuple[Position, Record]]:
        """Yields once all requests, oldest first, then all results."""
        for journal in (self._requests, self._results):
            for position, data in journal.recover():
                yield position, _decode(data)


def loaded_folder(message: bytes) -> str | None:
    train = decode_to_worker(message)
    assert isinstance(train, Train)
    match train.operation:
        case LoadWeights(folder=folder) | CreateModel(load_from=folder):
            return folder
        case _:
            return None


def _about(future: TrainFuture) -> JsonObject:
    return {name: getattr(future, name) for name in JournaledIdentity.__struct_fields__}
