"""Training requests: durable, in order, applied once.

submit → journal → in seq order → worker → result → hook of its kind → client; journal → worker may forget

Owns: what happens to a request and when. Never touches: HTTP, what operations mean, the journal's format
(`request_journal`).

A request that is refused with 4xx has used its number: `reject` it, or its model waits for the gap.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from palestra.server.core.background import Background
from palestra.server.core.errors import Refusal, not_kept
from palestra.server.core.futures import LOADING, SAVING, RequestKind, TrainFuture, digest_of
from palestra.server.core.owners.quotas import FairQuota, OwnerQuotas
from palestra.server.core.owners.usage import UsageAccount
from palestra.server.core.paths import MAX_SEQ, TrainRequestId
from palestra.server.core.telemetry.observer import CallObserver
from palestra.server.core.training.dispatch import GIVE_UP_DEATHS, WorkerDispatcher
from palestra.server.core.training.lost_models import LostModels
from palestra.server.core.training.models import MAX_AHEAD, TrackedModel
from palestra.server.core.training.request_journal import RequestJournal
from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.store import Store
from palestra.store.errors import JournalError
from palestra.store.journal.acknowledged import AcknowledgedRequests
from palestra.store.queries import models as model_rows
from palestra.store.records import ModelStatus
from palestra.types.engine import (
    Blame,
    DropModel,
    EngineFailure,
    Loaded,
    Operation,
    Snapshotted,
    Stored,
    Train,
    Trained,
    TrainOutcome,
    decode_from_worker,
    encode_message,
)
from palestra.util.json_types import JsonObject

log = structlog.get_logger()

Hook = Callable[[TrainFuture, TrainOutcome], Awaitable[None]]
"""What the server does about a result before the client may see it."""

SETTLE_AGAIN_S = 5.0  # after a gap could not be recorded: a full disk stays full for a while
UNREAD_S = 60.0  # how long an answer that is not fetched stays in memory, in addition to its copy in the journal


class TrainingRequests:
    def __init__(
        self,
        store: Store,
        ledger: RequestJournal,
        acknowledged: AcknowledgedRequests,
        observer: CallObserver,
        quotas: OwnerQuotas,
        usage: UsageAccount,
        *,
        on_saved: Hook,
        on_lifted: Callable[[WorkerSupervisor], None],
        copied_seq: Callable[[str], float],
        gap_wait_s: float,
        keep_results_s: float,
        max_pending_bytes: int,
    ):
        """`on_lifted` is called when the quarantine of a worker ends. `copied_seq` says up to which number a model's
        snapshots were copied for other servers, if they have to be."""
        self.models: dict[str, TrackedModel] = {}
        self.absent: set[str] = set()
        """Models whose base is not served at present: their records in the journal stay."""
        self.absent_folders: set[str] = set()
        """Checkpoints that their requests load."""
        self.futures: dict[str, TrainFuture] = {}
        self._hooks: dict[RequestKind, Hook] = {RequestKind.CREATE_MODEL: self._on_created}
        self._hooks |= dict.fromkeys(SAVING, on_saved)
        self.ledger, self.acknowledged, self.lost = ledger, acknowledged, LostModels(store)
        self._store, self._observer, self._on_lifted, self._copied_seq = store, observer, on_lifted, copied_seq
        self._dispatchers: dict[WorkerSupervisor, WorkerDispatcher] = {}
        self._gap_wait_s, self._keep_results_s = gap_wait_s, keep_results_s
        self._quota = FairQuota(max_pending_bytes)
        self._quotas, self._usage = quotas, usage
        self.writing = Background()

    # In

    async def submit(
        self,
        model: TrackedModel,
        seq_id: int,
        kind: RequestKind,
        operation: Operation,
        reply: JsonObject,
        completed: Operation | None = None,
    ) -> TrainFuture:
        """Returns when the request is durable. The same number again returns the same future. `completed` is what the
        worker gets, if the server adds something that may be gone when the request is repeated."""
        if not self._is_here(model):
            lost = self.lost.message(model.model_id)
            raise Refusal(404, lost or f"{model.model_id} was unloaded, or its session has ended")
        request_id = str(TrainRequestId(model.model_id, seq_id))
        train = Train(request_id=request_id, model_id=model.model_id, seq_id=seq_id, operation=operation)
        message = encode_message(train)
        digest = digest_of(kind, message, reply)
        future = self._known(model, seq_id)
        if future is None:
            if completed is not None:
                message = encode_message(msgspec.structs.replace(train, operation=completed))
            future = self._register(model, seq_id, kind, message, digest, reply)
        elif future.digest != digest:
            raise _is_used(future)
        if future.durable is not None:
            await asyncio.shield(future.durable)
        return future

    def check_number(self, model: TrackedModel, seq_id: int, reply: JsonObject) -> None:
        """Refuses what `submit` would, for callers that have to record something elsewhere before it."""
        future = self._known(model, seq_id)
        if future is not None and future.reply != reply:
            raise _is_used(future)

    def earlier_reply(self, model: TrackedModel, seq_id: int) -> JsonObject | None:
        """Returns what the request gets that has this number already."""
        future = self._known(model, seq_id)
        return None if future is None else future.reply

    def reject(self, model: TrackedModel, seq_id: int) -> None:
        """Notes that a refused request has used its number, so that later requests do not wait for it."""
        if model.is_open(seq_id):
            self.writing.run(self._settle(model, [seq_id]))

    def _known(self, model: TrackedModel, seq_id: int) -> TrainFuture | None:
        future = model.futures.get(seq_id)
        if future is not None or model.is_open(seq_id):
            return future
        if seq_id >= model.next_seq + MAX_AHEAD:
            raise Refusal(
                400, f"seq_id {seq_id} of {model.model_id} is too far ahead; the next one is {model.next_seq}"
            )
        raise Refusal(400, f"seq_id {seq_id} of {model.model_id} came too late: later requests have run without it")

    def _register(
        self,
        model: TrackedModel,
        seq_id: int,
        kind: RequestKind,
        message: bytes,
        digest: bytes,
        reply: JsonObject,
    ) -> TrainFuture:
        if not model.is_last_missing(seq_id):  # what is waiting would wait for ever for what is refused
            if not self._quota.admits(model.owner):
                raise Refusal(
                    429, "too much training data is waiting; try again when some of it is done", retry_after_s=1.0
                )
            self._quotas.check_pending_bytes(model.owner, self._quota.used(model.owner))
            if kind.is_pass:  # what was trained may always be applied and saved
                self._quotas.check_tokens(model.owner)
        future = TrainFuture(
            str(TrainRequestId(model.model_id, seq_id)),
            model.owner,
            digest,
            model_id=model.model_id,
            seq_id=seq_id,
            kind=kind,
            reply=reply,
            message=message,
            durable=asyncio.get_running_loop().create_future(),
        )
        self.place(model, future)
        model.last_request_at = time.time()
        self.writing.run(self._write(model, future))
        return future

    def place(self, model: TrackedModel, future: TrainFuture) -> None:
        future.size = len(future.message or b"")
        if not future.is_done:
            self._quota.acquire(future.owner, future.size)
        self.futures[future.request_id] = future
        model.add(future)

    async def _write(self, model: TrackedModel, future: TrainFuture) -> None:
        durable = future.durable
        assert durable is not None
        try:
            future.request_at = await self.ledger.record_request(future)
        except Exception as e:  # boundary: whatever it is, the client must not wait for ever
            if not isinstance(e, JournalError):
                log.exception("a request could not be stored", request_id=future.request_id)
                e = JournalError(str(e))
            self._forget(future)
            durable.set_exception(not_kept(e))
            if self._is_here(model):
                if e.is_lasting:
                    self.reject(model, future.seq_id)
                self.advance(model)
            return
        future.durable = None
        durable.set_result(None)
        if self._is_here(model):
            self.advance(model)
        else:  # dropped meanwhile: `future` has failed
            self.ledger.release_request(future)

    def pending_bytes_of(self, owner: str) -> int:
        """Returns the size of an owner's requests that wait or run."""
        return self._quota.used(owner)

    def _is_here(self, model: TrackedModel) -> bool:
        return self.models.get(model.model_id) is model

    def finished_at_once(self, model_id: str, owner: str, kind: RequestKind, reply: JsonObject) -> TrainFuture:
        """Returns a finished future for what the server has done itself, outside of the model's numbers; known until
        the server stops."""
        request_id = str(TrainRequestId(model_id, MAX_SEQ))
        future = TrainFuture(request_id, owner, b"", model_id=model_id, seq_id=MAX_SEQ, kind=kind, reply=reply)
        done = Trained(request_id=request_id, model_id=model_id, seq_id=MAX_SEQ, outcome=Loaded())
        future.finish(encode_message(done))
        self.futures[request_id] = future
        return future

    # In order

    def is_held(self, worker: WorkerSupervisor) -> bool:
        """Whether a worker may be asked for nothing else now, because it is quarantined."""
        return self.dispatcher(worker).is_quarantined

    def dispatcher(self, worker: WorkerSupervisor) -> WorkerDispatcher:
        if worker not in self._dispatchers:
            self._dispatchers[worker] = WorkerDispatcher(worker, self.ledger, self.models, self._on_lifted)
        return self._dispatchers[worker]

    def advance(self, model: TrackedModel) -> None:
        ready = model.take_ready()
        if ready:  # before any client is informed
            self.acknowledged.note(model.model_id, model.next_seq - 1)
        self.dispatcher(model.worker).dispatch(model)
        for future in ready:
            future.message = None  # whether it was sent or not: the journal has it
        model.stop_timer()  # every arrival is a sign that the rest may be on its way
        if not model.has_gap:
            return
        if given_up := model.sure_gap:
            self.writing.run(self._settle(model, given_up))
        else:
            model.gap_timer = asyncio.get_running_loop().call_later(self._gap_wait_s, self._give_up, model)

    def _give_up(self, model: TrackedModel) -> None:
        model.gap_timer = None
        if model.early:
            self.writing.run(self._settle(model, model.missing_before(min(model.early))))

    async def _settle(self, model: TrackedModel, seq_ids: list[int]) -> None:
        model.stop_timer()
        model.settled.update(seq_ids)
        model.given_up.difference_update(seq_ids)
        model.settling += 1
        try:
            at = await self.ledger.give_up(model.model_id, seq_ids)
            if self._is_here(model):
                model.settled_at.append((max(seq_ids, default=-1), at))
            else:
                self.ledger.release(at)
        except JournalError as e:
            log.error(
                "a gap in the sequence numbers could not be stored; trying again",
                model=model.model_id,
                seq_ids=seq_ids,
                error=str(e),
            )
            model.settled.difference_update(seq_ids)  # otherwise a restart would take them for requests that were lost
            model.given_up.update(seq_ids)
            if self._is_here(model):
                model.gap_timer = asyncio.get_running_loop().call_later(SETTLE_AGAIN_S, self.advance, model)
            return
        finally:
            model.settling -= 1
        if self._is_here(model):
            self.advance(model)

    # Results

    def on_trained(self, worker: WorkerSupervisor, message: Trained, frame: bytes) -> None:
        self.dispatcher(worker).landed(message.request_id)
        future = self.futures.get(message.request_id)
        if future is None or future.result_at is not None:
            worker.link.send(Stored(request_ids=[message.request_id]))
            if future is not None and isinstance(message.outcome, EngineFailure):
                self._check_replay(future, message.outcome)
        elif not future.is_finishing:
            future.is_finishing = True
            self.writing.run(self._finish(worker, future, message, frame))

    async def _finish(self, worker: WorkerSupervisor, future: TrainFuture, message: Trained, frame: bytes) -> None:
        hook = self._hooks.get(future.kind)
        if hook is not None:
            try:
                await hook(future, message.outcome)
            except Exception as e:
                log.exception("a result could not be handled", request_id=future.request_id)
                failure = EngineFailure(message=f"the server could not store the result: {e}", blame=Blame.SERVER)
                message = msgspec.structs.replace(message, outcome=failure)
                frame = encode_message(message)
        if not future.is_done:
            future.is_failed = isinstance(message.outcome, EngineFailure)
            self._usage.trained(future.owner, future.model_id, future.seq_id, message.outcome, message.compute_s)
            self._finished(future, frame)
            self._observer.finished(
                future.kind,
                time.monotonic() - future.submitted,
                message.compute_s,
                base_model=worker.name,
                outcome=outcome_name(message.outcome),
                request_id=future.request_id,
            )
        try:
            future.result_at = await self.ledger.answer(future, frame)
        except JournalError as e:  # the worker keeps it, and it is requested again after a restart
            log.error("a result could not be written", request_id=future.request_id, error=str(e))
            future.is_finishing = False
            return
        model = self.models.get(future.model_id)
        if model is None or future.seq_id <= model.snapshot_seq:
            self.ledger.release_request(future)
        worker.link.send(Stored(request_ids=[future.request_id]))

    async def _on_created(self, future: TrainFuture, outcome: TrainOutcome) -> None:
        failed = outcome.message if isinstance(outcome, EngineFailure) else None
        status = ModelStatus.FAILED if failed else ModelStatus.READY
        await self._store.write(lambda c: model_rows.set_model_status(c, future.model_id, status, error=failed))
        model = self.models.get(future.model_id)
        if failed and model is not None:
            self.drop(model, failed)

    def _check_replay(self, future: TrainFuture, failure: EngineFailure) -> None:
        """Checks a replay: what succeeded once must succeed again; otherwise the model is not what its client was
        told."""
        model = self.models.get(future.model_id)
        if model is not None and not isinstance(self.outcome(future), EngineFailure):
            self.lose(model, f"request {future.seq_id}, done before, failed when it was repeated: {failure.message}")

    def lose(self, model: TrackedModel, why: str) -> None:
        self.lost.add(model, why)
        self._take_out(model)
        self.writing.run(self._end_lost(model, why))

    async def _end_lost(self, model: TrackedModel, why: str) -> None:
        """Ends a lost model. The database comes first, otherwise the next start would not notice the loss."""
        self._let_go(model, await self.lost.note(model, why))

    def outcome(self, future: TrainFuture) -> TrainOutcome:
        """Returns the outcome of a future that is done."""
        frame = future.frame
        if frame is None:
            try:
                frame = self.ledger.frame_of(future)
            except JournalError as e:
                log.error("a result cannot be read again", request_id=future.request_id, error=str(e))
                return EngineFailure(message=f"the result cannot be read again: {e}", blame=Blame.SERVER)
        elif future.result_at is not None:
            future.frame = None  # read once: from now on it is in the journal only
        message = decode_from_worker(frame)
        assert isinstance(message, Trained)
        return message.outcome

    def on_snapshotted(self, message: Snapshotted) -> None:
        model = self.models.get(message.model_id)
        if model is not None:
            self.cover(model, message.covered_seq)

    def cover(self, model: TrackedModel, seq_id: int) -> None:
        """Notes up to which number the worker's snapshots have everything."""
        model.covered_seq = seq_id
        self._cover(model)

    def on_copied(self, model_id: str) -> None:
        """Called when a snapshot was copied for other servers."""
        if (model := self.models.get(model_id)) is not None:
            self._cover(model)

    def _cover(self, model: TrackedModel) -> None:
        seq_id = min(model.covered_seq, self._copied_seq(model.model_id))
        if seq_id > model.snapshot_seq:
            self.writing.run(self._covered(model, int(seq_id)))

    async def _covered(self, model: TrackedModel, seq_id: int) -> None:
        """Notes what a snapshot covers. The database comes first: only then may the journal release a request, and only
        if it has the answer."""
        await self._store.write(lambda c: model_rows.advance_snapshots(c, {model.model_id: seq_id}))
        for n in range(model.snapshot_seq + 1, seq_id + 1):
            future = model.futures.get(n)
            if future is not None and future.result_at is not None:
                self.ledger.release_request(future)
        model.snapshot_seq = max(model.snapshot_seq, seq_id)
        self._release_settled(model, model.snapshot_seq)

    def _release_settled(self, model: TrackedModel, up_to: int) -> None:
        for last, position in model.settled_at:
            if last <= up_to:
                self.ledger.release(position)
        model.settled_at = [s for s in model.settled_at if s[0] > up_to]

    # Worker exits

    def on_exit(self, worker: WorkerSupervisor, *, is_blameless: bool = False) -> None:
        """`is_blameless`: it was asked to end."""
        guilty = self.dispatcher(worker).on_exit(is_blameless=is_blameless)
        if guilty is None:
            return
        log.error("a request killed the worker repeatedly; it is given up", request_id=guilty.request_id)
        why = f"killed the worker {GIVE_UP_DEATHS} times in a row while nothing else ran"
        if guilty.is_done:
            self.lose(self.models[guilty.model_id], f"request {guilty.seq_id}, done before, {why} at a replay")
        else:
            given_up = guilty.failed(f"this request {why}; it was given up and had no effect")
            self.on_trained(worker, given_up, encode_message(given_up))

    # Leaving

    def drop(self, model: TrackedModel, reason: str) -> None:
        """Removes a model; waiting requests fail with the reason, finished ones can be read for a while."""
        self._take_out(model)
        self._let_go(model, reason)

    def _take_out(self, model: TrackedModel) -> None:
        model.stop_timer()
        self.models.pop(model.model_id, None)
        model.worker.link.send(DropModel(model_id=model.model_id))
        self.dispatcher(model.worker).drop(model)

    def _let_go(self, model: TrackedModel, reason: str) -> None:
        self._release_settled(model, MAX_SEQ)
        for future in model.futures.values():
            self.ledger.release_request(future)
            if not future.is_done:
                self.fail(future, reason)
        self.acknowledged.forget(model.model_id)

    def fail(self, future: TrainFuture, reason: str) -> None:
        future.is_failed = True
        self._finished(future, encode_message(future.failed(reason)))

    def lose_result(self, future: TrainFuture) -> None:
        """Notes that a result is lost: the request had its effect, and has it again when the model is replayed."""
        log.error("a result is lost", request_id=future.request_id)
        why = "this request was done, but its result is lost: the journal of results was damaged"
        self._finished(future, encode_message(future.failed(why)))

    def _finished(self, future: TrainFuture, frame: bytes) -> None:
        future.finish(frame)
        self._quota.release(future.owner, future.size)

    def wake(self) -> None:
        """Answers all who wait for results, because the server is about to stop."""
        for future in self.futures.values():
            future.wake()

    def expire(self, now: float) -> None:
        """Deletes results older than the configured time; requests that may be replayed stay."""
        for future in list(self.futures.values()):
            if future.finished_at is None:
                continue
            age_s = now - future.finished_at
            if age_s > self._keep_results_s and future.request_at is None:
                self._forget(future)
            elif age_s > UNREAD_S and future.result_at is not None:
                future.frame = None

    def folders_to_load(self) -> set[str]:
        """Returns the checkpoints that a replay would need."""
        found = (
            self.ledger.folder_of(future)
            for future in self.futures.values()
            if future.kind in LOADING and (future.message is not None or future.request_at is not None)
        )
        return self.absent_folders.union(folder for folder in found if folder)

    def _forget(self, future: TrainFuture) -> None:
        self.futures.pop(future.request_id, None)
        model = self.models.get(future.model_id)
        if model is not None:
            model.forget(future)
        if not future.is_done:
            self._quota.release(future.owner, future.size)
        self.ledger.release_request(future)
        self.ledger.release_result(future.result_at)


def _is_used(future: TrainFuture) -> Refusal:
    return Refusal(400, f"seq_id {future.seq_id} of {future.model_id} was used for another request")


def outcome_name(outcome: object) -> str:
    return f"{outcome.blame}_error" if isinstance(outcome, EngineFailure) else "ok"
