"""Replicas as the samplers of a base model.

Sample → a replica that knows the conversation, or the least busy one → its adapter there → the sample → Sampled
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from palestra.server.core.background import Background
from palestra.server.core.checkpoints.adapter_transfers import AdapterTransfers, AdapterUnavailable, TransferredAdapter
from palestra.server.core.errors import Refusal
from palestra.server.core.samples.runners import SampleRunner
from palestra.server.core.telemetry.metrics import Metrics
from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.server.replicas.errors import ReplicaBusy, ReplicaError, ReplicaLost, ReplicaRefused, UnknownAdapter
from palestra.server.replicas.replica import Replica
from palestra.server.replicas.replica_set import ReplicaSet
from palestra.types import SampleResult
from palestra.types.engine import (
    Blame,
    DropSamplers,
    EngineFailure,
    KeepSampler,
    KeptSampler,
    Operation,
    Sample,
    Sampled,
    SampleWeights,
    SavedAdapter,
    Streamed,
    decode_to_worker,
)
from palestra.util.backoff import Backoff

log = structlog.get_logger()

MAX_TRIES = 10  # of a sample at replicas that broke off, as many as at a worker: it may be the cause
BUSY = Backoff(0.25, 5.0)
"""Pause before a busy replica is asked again: the first, and the longest one."""


class ReplicaRunner(SampleRunner):
    def __init__(
        self,
        worker: WorkerSupervisor,
        metrics: Metrics,
        transfers: AdapterTransfers,
        *,
        wait_s: float,
        on_sampled: Callable[[Sampled], None],
        on_streamed: Callable[[Streamed], None],
    ):
        self._worker, self._metrics, self._transfers, self._wait_s = worker, metrics, transfers, wait_s
        self.replicas = ReplicaSet(worker.name, metrics, wait_s=wait_s)
        self._on_sampled, self._on_streamed = on_sampled, on_streamed
        self._running: dict[str, asyncio.Task[None]] = {}
        self._kept: dict[str, KeptSampler] = {}
        """Frozen weights by the id of their sampler, as far as they were asked for."""
        self._pushing = Background()

    async def stop(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self.replicas.stop()
        await self._pushing.settle_down()

    @property
    def is_up(self) -> bool:
        return self.replicas.is_up

    @property
    def waiting(self) -> int:
        """Returns the number of requests without a place, and of those in the replicas' queues at their last report."""
        return len(self._running) - self.replicas.placed + self.replicas.queued

    # Weights

    def keeping(self, sampler_id: str) -> Operation:
        return KeepSampler(sampler_id=sampler_id)

    def prepare(self, weights: SampleWeights) -> None:
        """Loads the adapter at every replica before the first sample needs it."""
        self._pushing.run(self._push(weights))

    async def _push(self, weights: SampleWeights) -> None:
        try:
            adapter = await self._adapter(weights)
        except (ReplicaRefused, AdapterUnavailable) as e:  # callers that sample from it get the error
            log.warning("an adapter is not pushed", error=str(e))
            return
        if adapter is not None:
            self.replicas.push(adapter)

    def on_worker_ready(self) -> None:
        self._transfers.ask_again(self._worker)

    def drop(self, sampler_ids: list[str]) -> None:
        self._worker.link.send(DropSamplers(sampler_ids=sampler_ids))
        for sampler_id in sampler_ids:
            kept = self._kept.pop(sampler_id, None)
            adapter = self._transfers.forget(kept) if kept is not None else None
            if adapter is not None:
                self.replicas.drop(adapter)

    async def _adapter(self, weights: SampleWeights) -> TransferredAdapter | None:
        if not isinstance(weights, KeptSampler | SavedAdapter):
            return None
        if isinstance(weights, KeptSampler):
            self._kept[weights.sampler_id] = weights
        adapter = await self._transfers.get(self._worker, weights)
        try:
            self.check_lora(adapter.lora)
        except Refusal as e:
            raise ReplicaRefused(e.detail) from None
        return adapter

    # Samples

    def send(self, request_id: str, message: bytes) -> None:
        sample = decode_to_worker(message)
        assert isinstance(sample, Sample)
        task = self._running[request_id] = asyncio.create_task(self._run(sample), name=f"sample {request_id}")
        task.add_done_callback(lambda _: self._running.pop(request_id, None))

    def cancel(self, request_id: str) -> None:
        """Ends the sampling at the replica."""
        task = self._running.get(request_id)
        if task is not None:
            task.cancel()

    async def _run(self, sample: Sample) -> None:
        try:
            sampled = await self._sample(sample)
            if isinstance(sampled.outcome, SampleResult):
                self._metrics.tokens_sampled(self._worker.name, sum(len(s.tokens) for s in sampled.outcome.sequences))
        except AdapterUnavailable as e:
            sampled = Sampled(request_id=sample.request_id, outcome=e.failure)
        except ReplicaError as e:
            blame = Blame.USER if isinstance(e, ReplicaRefused) else Blame.SERVER
            sampled = Sampled(request_id=sample.request_id, outcome=EngineFailure(message=str(e), blame=blame))
        except Exception as e:
            log.exception("a sample failed unexpectedly", request_id=sample.request_id)
            failure = EngineFailure(message=f"the server failed unexpectedly: {e!r}", blame=Blame.SERVER)
            sampled = Sampled(request_id=sample.request_id, outcome=failure)
        self._on_sampled(sampled)

    async def _sample(self, sample: Sample) -> Sampled:
        busy_until = time.monotonic() + self._wait_s
        pauses, tries = BUSY.pauses(), 0
        wait_s = next(pauses)
        progress, lost = _StreamProgress(self._on_streamed), None
        while True:
            adapter = await self._adapter(sample.weights)
            async with self.replicas.place(sample, adapter, avoid=lost) as replica:
                try:
                    return await self._ask(replica, adapter, sample, progress)
                except ReplicaBusy:
                    if time.monotonic() > busy_until:
                        raise
                    wait_s = next(pauses)
                except UnknownAdapter as e:  # it was restarted, or told to unload the adapter
                    loaded = adapter or replica.stand_in()
                    if loaded is None:
                        raise ReplicaLost(f"{replica.where} no longer serves the model: {e}") from None
                    replica.adapters.forget(loaded)
                    tries += 1
                except ReplicaLost as e:
                    replica.doubt()
                    lost, tries = replica, tries + 1
                    if progress.anything or tries >= MAX_TRIES:
                        raise
                    log.warning("a sample is sent again", request_id=sample.request_id, error=str(e))
                if tries >= MAX_TRIES:
                    raise ReplicaLost(f"{replica.where} lost the adapter repeatedly")
            self._metrics.replica_retried(self._worker.name)
            await asyncio.sleep(wait_s)

    async def _ask(
        self, replica: Replica, adapter: TransferredAdapter | None, sample: Sample, progress: _StreamProgress
    ) -> Sampled:
        adapter = adapter or replica.stand_in()
        if adapter is None:
            sampled = await replica.sample(sample, None, progress)
        else:
            async with replica.adapters.using(adapter) as name:
                sampled = await replica.sample(sample, name, progress)
        self._metrics.replica_sampled(self._worker.name, replica.number)
        if isinstance(sampled.outcome, SampleResult):
            for sequence in sampled.outcome.sequences:
                self.replicas.note((*sample.request.prompt, *sequence.tokens), replica)
        return sampled


class _StreamProgress:
    """Passes on a stream, and knows whether anything was sent: then it cannot begin again."""

    def __init__(self, tell: Callable[[Streamed], None]):
        self._tell, self.anything = tell, False

    def __call__(self, streamed: Streamed) -> None:
        self.anything = True
        self._tell(streamed)
