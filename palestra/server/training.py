"""Training requests: durable, in order, applied once.

    submit → journal → in seq order → worker → result → hook of its kind → client; journal → worker may forget

Owns: models as the server sees them, their order, the journal's records. Never touches: HTTP, what operations mean.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from palestra.server.errors import Refusal
from palestra.server.futures import Finished, JournalRecord, Requested, RequestKind, Settled, TrainFuture
from palestra.server.observer import Observer
from palestra.server.tinker.paths import MAX_SEQ, TrainRequestId
from palestra.server.workers import Worker
from palestra.store import Journal
from palestra.store.errors import JournalError
from palestra.store.journal import Position
from palestra.types import LoraConfig
from palestra.types.engine import (
    Blame,
    DropModel,
    Failure,
    Hello,
    Loaded,
    ModelState,
    Operation,
    Snapshotted,
    Stored,
    Train,
    Trained,
    TrainOutcome,
    decode_from_worker,
    encode_message,
)

log = structlog.get_logger()

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(JournalRecord).decode

Hook = Callable[[TrainFuture, TrainOutcome], Awaitable[None]]
"""What the server does about a result before the client may see it."""
SaveSnapshotSeq = Callable[[str, int], Awaitable[None]]

MAX_AHEAD = 10_000  # one call is some thousand chunks at most; a gap is settled number by number


@dataclass(slots=True, eq=False)
class TrainedModel:
    model_id: str
    session_id: str
    owner: str
    base_model: str
    lora: LoraConfig
    worker: Worker
    snapshot_seq: int = -1
    """Everything up to here is in a snapshot of the worker's."""
    next_seq: int = 0
    """Everything below has gone to the worker, or never will."""
    futures: dict[int, TrainFuture] = field(default_factory=dict)
    early: dict[int, TrainFuture] = field(default_factory=dict)
    """Those at or after `next_seq`."""
    settled: set[int] = field(default_factory=set)
    settled_at: list[tuple[int, Position]] = field(default_factory=list)
    """Where the journal says so, with the highest of the numbers: held until a snapshot covers that one."""
    settling: int = 0
    gap_timer: asyncio.TimerHandle | None = None
    last_request_at: float = field(default_factory=time.time)


class Training:
    def __init__(
        self,
        journal: Journal,
        observer: Observer,
        save_snapshot_seq: SaveSnapshotSeq,
        *,
        gap_wait_s: float,
        keep_results_s: float,
        max_pending_bytes: int,
    ):
        self.models: dict[str, TrainedModel] = {}
        self.futures: dict[str, TrainFuture] = {}
        self.hooks: dict[RequestKind, Hook] = {}
        self.pending_bytes = 0
        self._journal, self._observer, self._save_snapshot_seq = journal, observer, save_snapshot_seq
        self._gap_wait_s, self._keep_results_s = gap_wait_s, keep_results_s
        self._max_pending_bytes = max_pending_bytes
        self._tasks: set[asyncio.Task] = set()

    # In

    async def submit(
        self, model: TrainedModel, seq_id: int, kind: RequestKind, operation: Operation, reply: dict[str, Any]
    ) -> TrainFuture:
        """Returns when the request is durable. The same number again returns the same future."""
        if not self._is_here(model):
            raise Refusal(404, f"{model.model_id} was unloaded, or its session is over")
        future = self._known(model, seq_id)
        if future is None:
            future = self._register(model, seq_id, kind, operation, reply)
        elif future.digest != digest_of(kind, operation, reply):
            raise _is_used(future)
        if future.durable is not None:
            await asyncio.shield(future.durable)
        return future

    def check_number(self, model: TrainedModel, seq_id: int, reply: dict[str, Any]) -> None:
        """Refuses what `submit` would, for those who have to note something elsewhere before it."""
        future = self._known(model, seq_id)
        if future is not None and future.reply != reply:
            raise _is_used(future)

    def reject(self, model: TrainedModel, seq_id: int) -> None:
        """A request that was refused has used its number: nobody waits for it."""
        is_open = model.next_seq <= seq_id < model.next_seq + MAX_AHEAD
        if is_open and seq_id not in model.futures and seq_id not in model.settled:
            self._run(self._settle(model, [seq_id]))

    def _known(self, model: TrainedModel, seq_id: int) -> TrainFuture | None:
        future = model.futures.get(seq_id)
        if future is not None:
            return future
        if seq_id < model.next_seq or seq_id in model.settled:
            raise Refusal(400, f"seq_id {seq_id} of {model.model_id} came too late: later requests have run without it")
        if seq_id >= model.next_seq + MAX_AHEAD:
            raise Refusal(400, f"seq_id {seq_id} of {model.model_id} is far ahead: the next one is {model.next_seq}")
        return None

    def _register(
        self, model: TrainedModel, seq_id: int, kind: RequestKind, operation: Operation, reply: dict[str, Any]
    ) -> TrainFuture:
        if self.pending_bytes > self._max_pending_bytes:
            raise Refusal(429, "too much training data is waiting; come back when some is done", retry_after_s=1.0)
        request_id = str(TrainRequestId(model.model_id, seq_id))
        train = Train(request_id=request_id, model_id=model.model_id, seq_id=seq_id, operation=operation)
        future = TrainFuture(
            request_id,
            model.owner,
            digest_of(kind, operation, reply),
            model_id=model.model_id,
            seq_id=seq_id,
            kind=kind,
            reply=reply,
            message=encode_message(train),
            durable=asyncio.get_running_loop().create_future(),
        )
        self._place(model, future)
        model.last_request_at = time.time()
        self._run(self._write(model, future))
        return future

    def _place(self, model: TrainedModel, future: TrainFuture) -> None:
        future.size = len(future.message or b"")
        self.pending_bytes += 0 if future.is_done else future.size
        self.futures[future.request_id] = model.futures[future.seq_id] = future
        if future.seq_id >= model.next_seq:
            model.early[future.seq_id] = future

    async def _write(self, model: TrainedModel, future: TrainFuture) -> None:
        assert future.durable is not None
        assert future.message is not None
        record = Requested(
            request_id=future.request_id,
            model_id=future.model_id,
            seq_id=future.seq_id,
            owner=future.owner,
            kind=future.kind,
            digest=future.digest,
            reply=future.reply,
            message=future.message,
        )
        durable = future.durable
        try:
            future.request_at = await self._journal.append(_encode(record))
        except JournalError as e:
            self._forget(future)
            durable.set_exception(Refusal(503, f"the request could not be kept: {e}", retry_after_s=5.0))
            return
        future.durable = None
        durable.set_result(None)
        if self._is_here(model):
            self._advance(model)
        else:  # dropped meanwhile: `future` has failed
            self._journal.release(future.request_at)
            future.request_at = None

    def _is_here(self, model: TrainedModel) -> bool:
        return self.models.get(model.model_id) is model

    def finished_at_once(self, model: TrainedModel, kind: RequestKind, reply: dict[str, Any]) -> TrainFuture:
        """For what the server has done itself, outside the model's numbers: known until the server stops."""
        request_id = str(TrainRequestId(model.model_id, MAX_SEQ))
        future = TrainFuture(
            request_id, model.owner, b"", model_id=model.model_id, seq_id=MAX_SEQ, kind=kind, reply=reply
        )
        done = Trained(request_id=request_id, model_id=model.model_id, seq_id=MAX_SEQ, outcome=Loaded())
        future.finish(encode_message(done))
        self.futures[request_id] = future
        return future

    # In order

    def _advance(self, model: TrainedModel) -> None:
        while not model.settling:
            future = model.early.get(model.next_seq)
            if future is not None and future.durable is None:
                del model.early[model.next_seq]
                self._send(model, future)
            elif model.next_seq in model.settled:
                model.settled.discard(model.next_seq)
            else:
                break
            model.next_seq += 1
        if not model.early or model.settling or model.next_seq in model.early:
            self._stop_timer(model)
            return
        # A chunked call sends its first part last, so a pass may still fill the gap; nothing else can be of that call.
        border = max((n for n, f in model.early.items() if not f.kind.is_pass), default=-1)
        if border > model.next_seq:
            self._run(self._settle(model, self._missing(model, border)))
        elif model.gap_timer is None:
            model.gap_timer = asyncio.get_running_loop().call_later(self._gap_wait_s, self._give_up, model)

    def _give_up(self, model: TrainedModel) -> None:
        model.gap_timer = None
        if model.early:
            self._run(self._settle(model, self._missing(model, min(model.early))))

    def _missing(self, model: TrainedModel, border: int) -> list[int]:
        return [n for n in range(model.next_seq, border) if n not in model.early and n not in model.settled]

    async def _settle(self, model: TrainedModel, seq_ids: list[int]) -> None:
        self._stop_timer(model)
        model.settled.update(seq_ids)
        model.settling += 1
        try:
            at = await self._journal.append(_encode(Settled(model_id=model.model_id, seq_ids=seq_ids)))
            if self._is_here(model):
                model.settled_at.append((max(seq_ids, default=-1), at))
            else:
                self._journal.release(at)
        except JournalError as e:
            log.error("a gap could not be noted", model=model.model_id, seq_ids=seq_ids, error=str(e))
        finally:
            model.settling -= 1
        if self._is_here(model):
            self._advance(model)

    def _stop_timer(self, model: TrainedModel) -> None:
        if model.gap_timer is not None:
            model.gap_timer.cancel()
            model.gap_timer = None

    def _send(self, model: TrainedModel, future: TrainFuture) -> None:
        message, future.message = future.message, None
        if model.worker.link.is_up:
            model.worker.link.send_encoded(message or self._read_request(future))

    def _read_request(self, future: TrainFuture) -> bytes:
        assert future.request_at is not None
        record = _decode(self._journal.read(future.request_at))
        assert isinstance(record, Requested)
        return record.message

    # Back

    def on_trained(self, worker: Worker, message: Trained, frame: bytes) -> None:
        future = self.futures.get(message.request_id)
        if future is None or future.result_at is not None:
            worker.link.send(Stored(request_ids=[message.request_id]))
        elif not future.is_finishing:
            future.is_finishing = True
            self._run(self._finish(worker, future, message, frame))

    async def _finish(self, worker: Worker, future: TrainFuture, message: Trained, frame: bytes) -> None:
        hook = self.hooks.get(future.kind)
        if hook is not None:
            try:
                await hook(future, message.outcome)
            except Exception as e:
                log.exception("a result could not be taken note of", request_id=future.request_id)
                failure = Failure(message=f"the server could not keep the result: {e}", blame=Blame.SERVER)
                frame = encode_message(msgspec.structs.replace(message, outcome=failure))
        if not future.is_done:
            future.finish(frame)
            self.pending_bytes -= future.size
            total_s = time.monotonic() - future.submitted
            self._observer.finished(
                future.kind,
                total_s,
                message.compute_s,
                base_model=worker.name,
                outcome=outcome_name(message.outcome),
                request_id=future.request_id,
            )
        try:
            future.result_at = await self._journal.append(
                _encode(Finished(request_id=future.request_id, at=future.finished_at or time.time(), frame=frame))
            )
        except JournalError as e:  # the worker keeps it, and a restart asks for it again
            log.error("a result could not be written", request_id=future.request_id, error=str(e))
            future.is_finishing = False
            return
        worker.link.send(Stored(request_ids=[future.request_id]))

    def outcome(self, future: TrainFuture) -> TrainOutcome:
        """Of a future that is done."""
        frame = future.frame
        if frame is None:
            assert future.result_at is not None
            record = _decode(self._journal.read(future.result_at))
            assert isinstance(record, Finished)
            frame = record.frame
        elif future.result_at is not None:
            future.frame = None  # read once: from now on the journal has it
        message = decode_from_worker(frame)
        assert isinstance(message, Trained)
        return message.outcome

    def on_snapshotted(self, message: Snapshotted) -> None:
        model = self.models.get(message.model_id)
        if model is not None and message.seq_id > model.snapshot_seq:
            self._run(self._covered(model, message.seq_id))

    async def _covered(self, model: TrainedModel, seq_id: int) -> None:
        """The database first: only then may the journal forget."""
        await self._save_snapshot_seq(model.model_id, seq_id)
        for n in range(model.snapshot_seq + 1, seq_id + 1):
            future = model.futures.get(n)
            if future is not None and future.request_at is not None:
                self._journal.release(future.request_at)
                future.request_at = None
        model.snapshot_seq = max(model.snapshot_seq, seq_id)
        self._release_settled(model, model.snapshot_seq)

    def _release_settled(self, model: TrainedModel, up_to: int) -> None:
        for _, position in (s for s in model.settled_at if s[0] <= up_to):
            self._journal.release(position)
        model.settled_at = [s for s in model.settled_at if s[0] > up_to]

    # A worker comes

    def on_hello(self, worker: Worker, hello: Hello) -> None:
        states = {state.model_id: state for state in hello.models}
        for model_id in states:
            if model_id not in self.models:
                worker.link.send(DropModel(model_id=model_id))
        for model in [m for m in self.models.values() if m.worker is worker]:
            self._catch_up(model, states.get(model.model_id))
        for message in hello.unstored:
            self.on_trained(worker, message, encode_message(message))

    def _catch_up(self, model: TrainedModel, state: ModelState | None) -> None:
        if state is None and model.snapshot_seq >= 0:
            log.error("the worker has lost a model", model=model.model_id, snapshot_seq=model.snapshot_seq)
            self.drop(model, "the engine lost this model's state; load its last checkpoint into a new model")
            return
        received = -1
        if state is not None:
            received = state.received_seq
            self.on_snapshotted(Snapshotted(model_id=model.model_id, seq_id=state.snapshot_seq))
        for n in range(received + 1, model.next_seq):
            future = model.futures.get(n)
            if future is not None and future.request_at is not None:
                model.worker.link.send_encoded(self._read_request(future))

    # Leaving

    def drop(self, model: TrainedModel, reason: str) -> None:
        """The model goes; what still waits for it fails with the reason, what is done can be read for a while."""
        self._stop_timer(model)
        self.models.pop(model.model_id, None)
        model.worker.link.send(DropModel(model_id=model.model_id))
        self._release_settled(model, MAX_SEQ)
        for future in model.futures.values():
            if future.request_at is not None:
                self._journal.release(future.request_at)
                future.request_at = None
            if not future.is_done:
                self._fail(future, reason)

    def _fail(self, future: TrainFuture, reason: str) -> None:
        failure = Failure(message=reason, blame=Blame.USER)
        message = Trained(request_id=future.request_id, model_id=future.model_id, seq_id=future.seq_id, outcome=failure)
        future.finish(encode_message(message))
        self.pending_bytes -= future.size

    def expire(self, now: float) -> None:
        """Forgets results older than the configured time; requests that may be replayed stay."""
        old = [
            f
            for f in self.futures.values()
            if f.finished_at is not None and now - f.finished_at > self._keep_results_s and f.request_at is None
        ]
        for future in old:
            self._forget(future)

    def _forget(self, future: TrainFuture) -> None:
        self.futures.pop(future.request_id, None)
        model = self.models.get(future.model_id)
        if model is not None:
            model.futures.pop(future.seq_id, None)
            model.early.pop(future.seq_id, None)
        if not future.is_done:
            self.pending_bytes -= future.size
        for position in (future.request_at, future.result_at):
            if position is not None:
                self._journal.release(position)

    async def settle_down(self) -> None:
        """Waits until what is under way is written."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # After a restart

    def recover(self) -> None:
        """Reads the journal into the models that are registered; what belongs to no model is let go."""
        unknown: dict[str, TrainFuture] = {}
        for position, data in self._journal.recover():
            record = _decode(data)
            if isinstance(record, Requested):
                self._recover_request(position, record, unknown)
            elif isinstance(record, Finished):
                self._recover_result(position, record, unknown)
            else:
                model = self.models.get(record.model_id)
                if model is None or max(record.seq_ids, default=-1) <= model.snapshot_seq:
                    self._journal.release(position)
                else:
                    model.settled_at.append((max(record.seq_ids), position))
                    model.settled.update(n for n in record.seq_ids if n >= model.next_seq)
        for future in unknown.values():
            if not future.is_done:
                self._fail(future, "the model was unloaded")
        for model in self.models.values():
            self._advance(model)

    def _recover_request(self, position: Position, record: Requested, unknown: dict[str, TrainFuture]) -> None:
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
        model = self.models.get(record.model_id)
        if model is None or record.seq_id <= model.snapshot_seq:
            self._journal.release(position)
            future.request_at = None
        if model is None:
            unknown[future.request_id] = self.futures[future.request_id] = future
        else:
            self._place(model, future)

    def _recover_result(self, position: Position, record: Finished, unknown: dict[str, TrainFuture]) -> None:
        future = self.futures.get(record.request_id)
        if future is None or future.is_done:
            self._journal.release(position)
            return
        future.finish(None, record.at)
        future.result_at, future.is_finishing = position, True
        unknown.pop(record.request_id, None)

    def _run(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("background work failed", error=repr(task.exception()))


def digest_of(kind: RequestKind, operation: Operation, reply: dict[str, Any]) -> bytes:
    return hashlib.blake2b(_encode((kind, operation, reply)), digest_size=16).digest()


def _is_used(future: TrainFuture) -> Refusal:
    return Refusal(400, f"seq_id {future.seq_id} of {future.model_id} was used for another request")


def outcome_name(outcome: object) -> str:
    return f"{outcome.blame}_error" if isinstance(outcome, Failure) else "ok"
