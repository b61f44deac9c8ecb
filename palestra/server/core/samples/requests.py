"""Sampling sessions and samples. Samples are kept in memory: a lost one is answered 410 and requested again by the
client.

Owns: which weights a sampling session means, pending and finished samples. Never touches: HTTP, files.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import structlog

from palestra.server.core.errors import Refusal
from palestra.server.core.futures import RequestKind, SampleFuture, SampleMessages
from palestra.server.core.owners.quotas import FairQuota, OwnerQuotas
from palestra.server.core.owners.usage import UsageAccount, tokens_in
from palestra.server.core.paths import SampleRequestId, TinkerPath
from palestra.server.core.samples.polling import CLONE_STRIDE, Completions, NumberBlock, block_name
from palestra.server.core.samples.runners import SampleRunner
from palestra.server.core.samples.weights_changes import WeightsChanges, changes_of, with_weights
from palestra.server.core.telemetry.observer import CallObserver
from palestra.server.core.training.requests import outcome_name
from palestra.server.core.training.routing_records import RoutingRecords
from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.store import Store
from palestra.types import SampleRequest, SampleResult
from palestra.types.engine import (
    BaseModel,
    Blame,
    ChangeWeights,
    DropSamplers,
    EngineFailure,
    KeptSampler,
    Sample,
    Sampled,
    SampleWeights,
    SavedAdapter,
    Stats,
    Streamed,
    encode_message,
)

log = structlog.get_logger()

FIRST_OWN = (1 << 32) * CLONE_STRIDE  # numbers that the server gives: SDK clients count from below
ANY_BOOT = "0"
SENT_AGAIN = 10  # a sample that was running at so many deaths of the worker may be their cause
READ_KEEP_S = 60.0  # after the first reading: a poll whose answer was lost is soon repeated
UNCONFIRMED_KEEP_S = 600.0  # the same, of clients that say what has arrived; they may be slow to read thousands


@dataclass(slots=True, eq=False)
class SamplingSession:
    """A sampling session: frozen weights under a name."""

    sampler_id: str
    session_id: str
    owner: str
    base_model: str
    weights: SampleWeights
    worker: WorkerSupervisor
    model_path: str | None = None
    futures: dict[int, SampleFuture] = field(default_factory=dict)
    pending: int = 0
    """Number of futures that are not done."""
    completions: dict[int, Completions] = field(default_factory=dict)
    """Finished samples, for each clone that asks for many at once."""
    blocks: dict[int, NumberBlock] = field(default_factory=dict)
    """Numbers that each clone may have used, where they are not those of its first block."""
    is_restored: bool = False
    """Whether it is from before a restart, which has lost samples."""
    clones: int = 0
    own_numbers: Iterator[int] = field(default_factory=lambda: itertools.count(FIRST_OWN))
    """For requests without a number. Numbers are never used twice: a late answer must not be taken for that of another
    request."""

    @property
    def run(self) -> str:
        """The training run whose weights these are; empty for a base model."""
        if isinstance(self.weights, KeptSampler):
            return self.weights.model_id
        return TinkerPath.parse(self.model_path).model_id if self.model_path else ""

    def block(self, clone: int) -> NumberBlock:
        return self.blocks.get(clone) or NumberBlock.first_of(clone)

    @property
    def stored_blocks(self) -> list[str]:
        """Returns the names of the blocks that the database has."""
        return [block_name(self.sampler_id, clone) for clone, block in self.blocks.items() if block.is_stored]


class SamplingRequests:
    def __init__(
        self,
        observer: CallObserver,
        quotas: OwnerQuotas,
        usage: UsageAccount,
        *,
        max_pending: int,
        max_picture_bytes: int,
        keep_results_s: float,
        max_routing_bytes: int,
    ):
        self.boot = secrets.token_hex(6)
        self.samplers: dict[str, SamplingSession] = {}
        self.futures: dict[str, SampleFuture] = {}
        self.pending: dict[str, SampleFuture] = {}
        self._observer, self._quota, self._keep_results_s = observer, FairQuota(max_pending), keep_results_s
        self._picture_quota = FairQuota(max_picture_bytes)
        self._quotas, self._usage = quotas, usage
        self.runners: dict[WorkerSupervisor, SampleRunner] = {}
        """The runner of each base model. They report to this object, so `services` adds them when it exists."""
        self.routing = RoutingRecords(max_routing_bytes)
        self.changes = WeightsChanges()
        self._deaths: dict[str, int] = {}
        self._messages = SampleMessages()

    def submit(
        self, sampler: SamplingSession, seq_id: int, request: SampleRequest, *, stream: bool = False
    ) -> SampleFuture:
        """Submits a sample and returns at once: the worker samples it when it is up and the weights exist."""
        digest = hashlib.blake2b(msgspec.msgpack.encode(request), digest_size=16).digest()
        known = sampler.futures.get(seq_id)
        if known is not None:
            if known.digest != digest:
                raise Refusal(400, f"seq_id {seq_id} of {sampler.sampler_id} was used for another request")
            return known
        self.runners[sampler.worker].check(request)
        if not self._quota.admits(sampler.owner):
            raise Refusal(429, f"{len(self.pending)} samples are waiting; try again in a moment", retry_after_s=1.0)
        if request.pictures and not self._picture_quota.admits(sampler.owner):
            raise Refusal(429, "too many pictures are waiting; try again when some are done", retry_after_s=1.0)
        self._quotas.check_tokens(sampler.owner)
        self._quotas.check_pending_samples(sampler.owner, self._quota.used(sampler.owner))
        name = self._name(sampler, seq_id)
        salted = msgspec.structs.replace(request, cache_salt=sampler.owner)
        sample = Sample(request_id=str(name), weights=sampler.weights, request=salted, stream=stream)
        future = SampleFuture(
            str(name),
            sampler.owner,
            digest,
            sampler_id=sampler.sampler_id,
            seq_id=seq_id,
            sequence_ids=name.sequence_ids(request.num_samples),
            message=self._messages.make(sample),
            parts=asyncio.Queue() if stream else None,
            prompt_tokens=len(request.prompt),
            picture_bytes=sum(len(picture.packed) for picture in request.pictures),
        )
        sampler.futures[seq_id] = self.futures[future.request_id] = self.pending[future.request_id] = future
        self._quota.acquire(future.owner)
        if future.picture_bytes:
            self._picture_quota.acquire(future.owner, future.picture_bytes)
        sampler.pending += 1
        self._send(sampler.worker, future)
        return future

    def _name(self, sampler: SamplingSession, seq_id: int) -> SampleRequestId:
        """A client's own number names its sample also after a restart; ours begin again with every start."""
        return SampleRequestId(self.boot if seq_id >= FIRST_OWN else ANY_BOOT, sampler.sampler_id, seq_id)

    def _send(self, worker: WorkerSupervisor, future: SampleFuture) -> None:
        runner = self.runners[worker]
        if future.message is not None and not future.is_sent and runner.is_ready:
            future.is_sent = True
            runner.send(future.request_id, future.message.encode())

    def on_streamed(self, message: Streamed) -> None:
        for part in message.parts:
            future = self.pending.get(part.request_id)
            if future is not None:
                future.tell(part)

    def on_sampled(self, message: Sampled, frame: bytes) -> None:
        future = self._take(message.request_id)
        if future is None:
            return
        sampler = self.samplers.get(future.sampler_id)
        if sampler is not None:
            total_s = time.monotonic() - future.submitted
            self._observer.finished(
                RequestKind.SAMPLE,
                total_s,
                message.compute_s,
                base_model=sampler.worker.name,
                outcome=outcome_name(message.outcome),
                request_id=future.request_id,
            )
        if sampler is not None and isinstance(message.outcome, SampleResult):
            self._usage.sampled(
                future.owner,
                sampler.run,
                future.prompt_tokens,
                sampled_tokens=tokens_in(message.outcome),
                engine_s=message.compute_s,
            )
            if any(s.routing for s in message.outcome.sequences):
                scope = (future.owner, sampler.worker.name)
                self.routing.keep(scope, future.sequence_ids, message.outcome.sequences)
                frame = encode_message(message)
            self.changes.keep(future.owner, future.sequence_ids, changes_of(message, future.sampler_id))
        self._done(future, frame, is_failed=isinstance(message.outcome, EngineFailure))

    def change_weights(self, samplers: Iterable[SamplingSession], to: SamplingSession, *, keeps_keys: bool) -> int:
        """Lets samples of these samplers that wait or run go on with the weights of another one. Returns how many may
        do so: those of replicas end on the weights that they began with."""
        runner, weights = self.runners[to.worker], to.weights
        if not isinstance(weights, KeptSampler) or not runner.changes_weights:
            return 0
        sent: list[str] = []
        changed = 0
        for future in [one for sampler in samplers if sampler.worker is to.worker for one in sampler.futures.values()]:
            if future.message is None or future.request_id not in self.pending:
                continue
            message = with_weights(future.message, weights, self._messages)
            changed += message is not future.message
            if future.is_sent and message is not future.message:
                sent.append(future.request_id)
            future.message = message
        if sent:
            runner.change_weights(ChangeWeights(request_ids=sent, weights=weights, keeps_keys=keeps_keys))
        return changed

    def cancel(self, future: SampleFuture) -> None:
        if self._take(future.request_id) is not None:
            sampler = self.samplers.get(future.sampler_id)
            if sampler is not None:
                self.runners[sampler.worker].cancel(future.request_id)
                if future.has_told:  # what was drawn beyond that is not known here
                    self._usage.sampled(
                        future.owner, sampler.run, future.prompt_tokens, sampled_tokens=future.streamed_tokens
                    )
            self._fail(future, "the sample was cancelled")

    def forget(self, future: SampleFuture) -> None:
        """Forgets a sample that its client will not ask for again."""
        self.futures.pop(future.request_id, None)
        sampler = self.samplers.get(future.sampler_id)
        if sampler is not None:
            sampler.futures.pop(future.seq_id, None)

    def _take(self, request_id: str) -> SampleFuture | None:
        """Removes a pending sample; the caller has to complete it."""
        future = self.pending.pop(request_id, None)
        if future is not None:
            self._quota.release(future.owner)
            if future.picture_bytes:
                self._picture_quota.release(future.owner, future.picture_bytes)
            self._deaths.pop(request_id, None)
            sampler = self.samplers.get(future.sampler_id)
            if sampler is not None:
                sampler.pending -= 1
        return future

    def _done(self, future: SampleFuture, frame: bytes, *, is_failed: bool) -> None:
        future.message, future.is_failed = None, is_failed
        future.finish(frame)
        sampler = self.samplers.get(future.sampler_id)
        queue = sampler.completions.get(future.seq_id // CLONE_STRIDE) if sampler is not None else None
        if queue is not None:
            queue.add([future.request_id])

    def _fail(self, future: SampleFuture, reason: str, blame: Blame = Blame.USER) -> None:
        failure = Sampled(request_id=future.request_id, outcome=EngineFailure(message=reason, blame=blame))
        self._done(future, encode_message(failure), is_failed=True)

    # Many results at once

    async def reserve(self, store: Store, sampler: SamplingSession, seq_id: int) -> None:
        """Makes sure that a restarted server knows of this number. Called before a sample with it is acknowledged."""
        clone = seq_id // CLONE_STRIDE
        if not sampler.block(clone).has(seq_id):
            block = sampler.blocks.setdefault(clone, NumberBlock.first_of(clone))
            name = block_name(sampler.sampler_id, clone)
            await block.reserve(seq_id, store, name, lambda: self._numbers_of(sampler, clone))

    def completions(self, sampler: SamplingSession, clone: int) -> Completions:
        """Returns the queue of a clone. It begins with the samples that are done and were not read; after a restart,
        also with those that may have been lost: reading them, the client learns that it has to send them again."""
        queue = sampler.completions.get(clone)
        if queue is None:
            mine = {number: sampler.futures[number] for number in self._numbers_of(sampler, clone)}
            lost = [n for n in sampler.block(clone).numbers if n not in mine] if sampler.is_restored else []
            queue = sampler.completions[clone] = Completions([str(self._name(sampler, n)) for n in lost])
            queue.add(f.request_id for f in mine.values() if f.is_done and f.read_at is None)
        queue.asked_at = time.monotonic()
        return queue

    def pending_of_clone(self, sampler: SamplingSession, clone: int) -> list[SampleFuture]:
        futures = (sampler.futures[number] for number in self._numbers_of(sampler, clone))
        return [future for future in futures if not future.is_done]

    def _numbers_of(self, sampler: SamplingSession, clone: int) -> list[int]:
        return [number for number in sampler.futures if number // CLONE_STRIDE == clone]

    def wake(self) -> None:
        """Answers all who wait for results, because the server is about to stop."""
        for future in self.futures.values():
            future.wake()
        for sampler in self.samplers.values():
            for queue in sampler.completions.values():
                queue.wake()

    # Worker exits and starts

    def on_exit(self, worker: WorkerSupervisor) -> None:
        """Handles the death of a worker. A sample that was running at several deaths is not tried again: it may be
        their cause."""
        if not self.runners[worker].dies_with_worker:
            return
        self.runners[worker].on_stats(Stats())
        for future in list(self.pending.values()):
            if not future.is_sent or not self._is_of(future, worker):
                continue
            future.is_sent = False
            if future.has_told:
                self._take(future.request_id)
                self._fail(
                    future, "the engine died while this answer was streamed; send the request again", Blame.SERVER
                )
                continue
            deaths = self._deaths[future.request_id] = self._deaths.get(future.request_id, 0) + 1
            if deaths >= SENT_AGAIN:
                self._take(future.request_id)
                self._fail(future, f"the engine died {deaths} times during this sample")

    def on_hello(self, worker: WorkerSupervisor, sampler_ids: Iterable[str]) -> None:
        known = {s.sampler_id for s in self.samplers.values() if isinstance(s.weights, KeptSampler)}
        strays = [s for s in sampler_ids if s not in known]
        if strays:
            worker.link.send(DropSamplers(sampler_ids=strays))
        self.send_waiting(worker)

    def on_lifted(self, worker: WorkerSupervisor) -> None:
        """Called when the quarantine of a worker ends, during which samples and adapters had to wait."""
        self.send_waiting(worker)
        self.runners[worker].on_worker_ready()

    def send_waiting(self, worker: WorkerSupervisor) -> None:
        for future in self.pending.values():
            if self._is_of(future, worker):
                self._send(worker, future)

    def pending_of(self, owner: str) -> int:
        """Returns the number of an owner's samples that wait or run."""
        return self._quota.used(owner)

    def waiting(self, worker: WorkerSupervisor) -> int:
        """Returns the number of samples that have not begun, as far as it is known."""
        runner = self.runners[worker]
        if runner.is_ready:
            return runner.waiting
        return sum(self._is_of(future, worker) for future in self.pending.values())

    def folders_to_read(self) -> set[str]:
        """Returns the checkpoints that samples wait for."""
        samplers = (sampler for sampler in self.samplers.values() if sampler.pending)
        return {sampler.weights.folder for sampler in samplers if isinstance(sampler.weights, SavedAdapter)}

    def _is_of(self, future: SampleFuture, worker: WorkerSupervisor) -> bool:
        sampler = self.samplers.get(future.sampler_id)
        return sampler is not None and sampler.worker is worker

    # Leaving

    def drop(self, samplers: list[SamplingSession], reason: str) -> None:
        for sampler in samplers:
            for future in sampler.futures.values():
                if self._take(future.request_id) is not None:
                    self.runners[sampler.worker].cancel(future.request_id)
                    self._fail(future, reason)
            self.samplers.pop(sampler.sampler_id, None)
            if isinstance(sampler.weights, KeptSampler):
                self.runners[sampler.worker].drop([sampler.sampler_id])

    def confirm(self, owner: str, request_ids: Iterable[str]) -> None:
        """Forgets results that have arrived at their client, as it says."""
        for request_id in request_ids:
            future = self.futures.get(request_id)
            if future is not None and future.owner == owner and future.is_done:
                self.forget(future)

    def _confirms(self, future: SampleFuture) -> bool:
        """Whether its client asks for many results at once: it then says which have arrived."""
        sampler = self.samplers.get(future.sampler_id)
        return sampler is not None and future.seq_id // CLONE_STRIDE in sampler.completions

    def expire(self, now: float) -> None:
        for future in list(self.futures.values()):
            if future.finished_at is None:
                continue
            if future.read_at is None:
                is_over = now - future.finished_at > self._keep_results_s
            else:
                is_over = now - future.read_at > (UNCONFIRMED_KEEP_S if self._confirms(future) else READ_KEEP_S)
            if is_over:
                self.forget(future)
        idle_since = time.monotonic() - self._keep_results_s
        for sampler in self.samplers.values():
            for clone in [c for c, queue in sampler.completions.items() if queue.asked_at < idle_since]:
                del sampler.completions[clone]  # made again when its client asks again


def weights_of(sampler_id: str, model_id: str | None, seq_id: int | None, folder: str | None) -> SampleWeights:
    if folder is not None:
        return SavedAdapter(folder=folder)
    if model_id is not None and seq_id is not None:
        return KeptSampler(sampler_id=sampler_id, model_id=model_id, seq_id=seq_id)
    return BaseModel()
