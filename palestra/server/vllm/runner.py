"""vLLM as the sampler of a base model.

Sample → a server that knows the conversation, or the least busy one → its adapter there → /v1/completions → Sampled

Owns: the steps of a sample, its retries, in which folder weights are. Never touches: training, futures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from palestra.config.serve import ModelConfig
from palestra.server.core.background import Background
from palestra.server.core.errors import Refusal
from palestra.server.core.metrics import Metrics
from palestra.server.core.sample_runners import SampleRunner
from palestra.server.core.workers import WorkerHandle
from palestra.server.vllm.adapters import VllmAdapter
from palestra.server.vllm.errors import VllmBusy, VllmError, VllmLost, VllmRefused, VllmUnknownModel
from palestra.server.vllm.folders import AdapterFolders
from palestra.server.vllm.params import ServedModelFacts, check_request
from palestra.server.vllm.replica import VllmReplica
from palestra.server.vllm.replica_set import ReplicaSet
from palestra.server.vllm.sample_call import sample_once
from palestra.types import LoraConfig, SampleRequest, SampleResult
from palestra.types.engine import (
    BaseModel,
    Blame,
    EngineFailure,
    KeptSampler,
    ModelCard,
    Operation,
    Sample,
    Sampled,
    SampleWeights,
    SavedAdapter,
    SaveWeights,
    Streamed,
    decode_to_worker,
)

log = structlog.get_logger()

MAX_TRIES = 4  # of a sample at servers that broke off: the sample may be the cause
BUSY_S = (0.25, 5.0)
UNSERVED = {
    "delta_nets": ("train_attn", "delta nets (in_proj_q, in_proj_k, …)"),
    "mambas": ("train_attn", "Mamba layers (gate_proj, x_proj)"),
    "experts": ("train_mlp", "experts in Tinker's layout (shared outer matrices)"),
}
"""What vLLM's LoRA does not take as we write it: the option that trains it, and words for it."""


def refuse_unserved(card: ModelCard, lora: LoraConfig) -> None:
    """When the model is made: later, its adapters could be trained but never sampled."""
    for what in card.lora_beyond_dense:
        option, words = UNSERVED[what]
        if getattr(lora, option):
            raise Refusal(
                400,
                f"vLLM cannot serve adapters of {words}, which {card.architecture} has; set {option}=False, or serve "
                "the model with sampler=torch",
            )


"""Pause before a busy server is asked again: the first, and the longest one."""


class VllmRunner(SampleRunner):
    def __init__(
        self,
        worker: WorkerHandle,
        model: ModelConfig,
        metrics: Metrics,
        state: Path,
        *,
        is_live: Callable[[str], bool],
        until_saved: Callable[[KeptSampler], Awaitable[None]],
        on_sampled: Callable[[Sampled], None],
        on_streamed: Callable[[Streamed], None],
    ):
        self._worker, self._vllm, self._metrics = worker, model.vllm, metrics
        name = Path(worker.config.state).name
        self.folders = AdapterFolders(state / "vllm" / name / "adapters", is_live)
        trials, logs = state / "vllm" / name / "trials", state / "logs" / f"{name}-vllm"
        self.fleet = ReplicaSet(model, metrics, trials=trials, logs=logs)
        self._until_saved, self._on_sampled, self._on_streamed = until_saved, on_sampled, on_streamed
        self._running: dict[str, asyncio.Task[None]] = {}
        self._pushing = Background()

    async def start(self) -> None:
        assert self._worker.card is not None
        await self.fleet.start(self._worker.card)

    async def stop(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self.fleet.stop()
        await self._pushing.settle_down()

    @property
    def is_up(self) -> bool:
        return self.fleet.is_up

    @property
    def waiting(self) -> int:
        """Returns the number of requests without a slot, and of those in the servers' queues at the last check."""
        return len(self._running) - self.fleet.placed + self.fleet.queued

    def sweep(self) -> None:
        self.folders.sweep()

    # Capabilities

    def check_lora(self, lora: LoraConfig) -> None:
        if lora.rank > self._vllm.max_lora_rank:
            raise Refusal(
                400,
                f"rank {lora.rank} is more than this model's vLLM supports; use at most "
                f"{self._vllm.max_lora_rank} (the server's setting vllm.max_lora_rank)",
            )
        for part in ("train_unembed", "train_mlp", "train_attn"):
            if getattr(lora, part) and not self.fleet.serves(part):
                raise Refusal(400, f"this model's vLLM cannot serve adapters with {part}; set {part}=False")
        if (card := self._worker.card) is not None:
            refuse_unserved(card, lora)

    def check(self, request: SampleRequest) -> None:
        check_request(request, self._facts)

    @property
    def _facts(self) -> ServedModelFacts:
        card = self._worker.card
        assert card is not None
        return ServedModelFacts(self.fleet.context or card.max_positions, card.vocab_size, card.eos_token_ids)

    # Weights

    def keeping(self, sampler_id: str) -> Operation:
        return SaveWeights(folder=str(self.folders.of(sampler_id)), optimizer=False)

    def prepare(self, weights: SampleWeights) -> None:
        """Loads the adapter at every server before the first sample needs it."""
        self._pushing.run(self._push(weights))

    async def _push(self, weights: SampleWeights) -> None:
        try:
            adapter = await self._adapter(weights)
        except VllmRefused as e:  # callers that sample from it get the error
            log.warning("an adapter is not pushed", error=str(e))
            return
        if adapter is not None:
            self.fleet.push(adapter)

    def drop(self, sampler_ids: list[str]) -> None:
        """Drops samplers; their folders are deleted by the next sweeps."""
        for sampler_id in sampler_ids:
            try:
                self.fleet.drop(VllmAdapter.read(str(self.folders.of(sampler_id))))
            except VllmRefused:
                continue

    async def _adapter(self, weights: SampleWeights) -> VllmAdapter | None:
        match weights:
            case BaseModel():
                return None
            case SavedAdapter(folder=folder):
                adapter = await asyncio.to_thread(VllmAdapter.read, folder)
            case KeptSampler(sampler_id=sampler_id):
                folder = self.folders.of(sampler_id)
                if not folder.is_dir():
                    await self._until_saved(weights)
                if not folder.is_dir():
                    raise VllmRefused(
                        f"sampler {sampler_id!r} no longer exists: its session ended, or its weights were not stored"
                    )
                adapter = await asyncio.to_thread(VllmAdapter.read, str(folder))
        try:
            self.check_lora(adapter.lora)
        except Refusal as e:
            raise VllmRefused(e.detail) from None
        return adapter

    # Samples

    def send(self, request_id: str, message: bytes) -> None:
        sample = decode_to_worker(message)
        assert isinstance(sample, Sample)
        task = self._running[request_id] = asyncio.create_task(self._run(sample), name=f"sample {request_id}")
        task.add_done_callback(lambda _: self._running.pop(request_id, None))

    def cancel(self, request_id: str) -> None:
        """Closes the request to vLLM, which ends the sampling there."""
        task = self._running.get(request_id)
        if task is not None:
            task.cancel()

    async def _run(self, sample: Sample) -> None:
        started = time.monotonic()
        try:
            outcome = await self._sample(sample)
            self._metrics.tokens_sampled(self._worker.name, sum(len(s.tokens) for s in outcome.sequences))
        except VllmRefused as e:
            outcome = EngineFailure(message=str(e), blame=Blame.USER)
        except VllmError as e:
            outcome = EngineFailure(message=str(e), blame=Blame.SERVER)
        except Exception as e:
            log.exception("a sample by vLLM failed unexpectedly", request_id=sample.request_id)
            outcome = EngineFailure(message=f"the server failed unexpectedly: {e!r}", blame=Blame.SERVER)
        seconds = time.monotonic() - started
        self._on_sampled(Sampled(request_id=sample.request_id, outcome=outcome, compute_s=seconds))

    async def _sample(self, sample: Sample) -> SampleResult:
        adapter = await self._adapter(sample.weights)
        busy_until = time.monotonic() + self._vllm.wait_s
        (wait_s, longest_wait), tries = BUSY_S, 0
        progress, lost = _StreamProgress(self._on_streamed), None
        while True:
            replica = await self.fleet.pick(sample.request.prompt, avoid=lost)
            try:
                return await self._ask(replica, adapter, sample, progress)
            except VllmBusy:
                if time.monotonic() > busy_until:
                    raise
                wait_s = min(longest_wait, wait_s * 2)
            except VllmUnknownModel as e:  # it was restarted, or told to unload the adapter
                loaded = adapter or self.fleet.stand_in(replica)
                if loaded is None:
                    raise VllmLost(f"vLLM at {replica.url} no longer serves {replica.base_name}: {e}") from None
                replica.adapters.forget(loaded)
                tries += 1
            except VllmLost as e:
                replica.doubt()
                lost, tries = replica, tries + 1
                if progress.anything or tries >= MAX_TRIES:
                    raise
                log.warning("a sample is sent to vLLM again", request_id=sample.request_id, error=str(e))
            if tries >= MAX_TRIES:
                raise VllmLost(f"vLLM at {replica.url} lost the adapter repeatedly")
            self._metrics.vllm_retried(self._worker.name)
            await asyncio.sleep(wait_s)

    async def _ask(
        self, replica: VllmReplica, adapter: VllmAdapter | None, sample: Sample, progress: _StreamProgress
    ) -> SampleResult:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(replica.place())
            model = replica.base_name
            adapter = adapter or self.fleet.stand_in(replica)
            if adapter is not None:
                model = await stack.enter_async_context(replica.adapters.using(adapter))
            result = await sample_once(replica.client, model, sample, self._facts, progress)
        for sequence in result.sequences:
            self.fleet.note((*sample.request.prompt, *sequence.tokens), replica)
        return result


class _StreamProgress:
    """Passes on a stream, and knows whether anything was sent: then it cannot begin again."""

    def __init__(self, tell: Callable[[Streamed], None]):
        self._tell, self.anything = tell, False

    def __call__(self, streamed: Streamed) -> None:
        self.anything = True
        self._tell(streamed)
