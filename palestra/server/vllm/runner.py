"""vLLM servers as the samplers of a base model: started or found, and what all of them can do."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from palestra.config.serve import ModelConfig
from palestra.server.core.checkpoints.adapter_transfers import AdapterTransfers
from palestra.server.core.errors import Refusal
from palestra.server.core.telemetry.metrics import Metrics
from palestra.server.core.workers.supervisor import WorkerError, WorkerSupervisor
from palestra.server.replicas.errors import ReplicaError
from palestra.server.replicas.runner import ReplicaRunner
from palestra.server.vllm.params import ServedModelFacts, check_request
from palestra.server.vllm.probe import make_trials
from palestra.server.vllm.process import AdapterSource, VllmProcess
from palestra.server.vllm.replica import VllmContext, VllmReplica
from palestra.types import LoraConfig, SampleRequest
from palestra.types.engine import ModelCard, Sampled, Streamed

UNSERVED = {
    "delta_nets": ("train_attn", "delta nets (in_proj_q, in_proj_k, …)"),
    "mambas": ("train_attn", "Mamba layers (gate_proj, x_proj)"),
    "experts": ("train_mlp", "experts in Tinker's layout (shared outer matrices)"),
}
"""What vLLM's LoRA does not take as we write it: the option that trains it, and words for it."""
PREFIX_BYTES = 4


def refuse_unserved(card: ModelCard, lora: LoraConfig) -> None:
    """Refuses a model when it is made: later, its adapters could be trained but never sampled."""
    for what in card.lora_beyond_dense:
        option, reason = UNSERVED[what]
        if getattr(lora, option):
            raise Refusal(
                400,
                f"vLLM cannot serve adapters of {reason}, which {card.architecture} has; set {option}=False, or serve "
                "the model with sampler=torch",
            )


class VllmRunner(ReplicaRunner):
    def __init__(
        self,
        worker: WorkerSupervisor,
        model: ModelConfig,
        metrics: Metrics,
        transfers: AdapterTransfers,
        source: AdapterSource,
        state: Path,
        *,
        on_sampled: Callable[[Sampled], None],
        on_streamed: Callable[[Streamed], None],
    ):
        """`source` is where servers that are started here fetch adapters."""
        super().__init__(
            worker, metrics, transfers, wait_s=model.vllm.wait_s, on_sampled=on_sampled, on_streamed=on_streamed
        )
        self._model, self._vllm, self._source = model, model.vllm, source
        name = Path(worker.config.state).name
        self._folder, self._logs = state / "vllm" / name, state / "logs" / f"{name}-vllm"
        self._servers: list[VllmReplica] = []

    async def start(self) -> None:
        """Returns when samples can be requested; raises WorkerError if they cannot."""
        card = self._card
        try:
            trials = await asyncio.to_thread(
                make_trials, self._transfers, self._model.path, card.vocab_size, self._vllm.max_lora_rank
            )
        except (OSError, ValueError, KeyError) as e:
            raise WorkerError(f"{self._model.path} cannot be prepared for vLLM: {e!r}") from None
        owner = hashlib.blake2b(str(self._folder).encode(), digest_size=PREFIX_BYTES).hexdigest()
        context = VllmContext(
            self._vllm,
            card,
            self._transfers,
            trials,
            prefix=f"palestra-{owner}-",
            on_change=self.replicas.on_change,
            on_load=lambda: self._metrics.replica_loaded(self._worker.name),
        )
        api_key = self._vllm.api_key or os.environ.get("VLLM_API_KEY")
        for number, place in enumerate(self._places()):
            server = VllmReplica(number, place, context, api_key=api_key)
            self._servers.append(server)
            self.replicas.add(server)
            server.start()
        try:
            await self._until_there()
        except ReplicaError as e:
            await self.stop()
            raise WorkerError(str(e)) from None

    def _places(self) -> list[VllmProcess | str]:
        if self._vllm.urls:
            return [*self._vllm.urls]
        logs = [self._logs.with_name(f"{self._logs.name}-{n}.log") for n in range(self._vllm.replicas)]
        return [
            VllmProcess(self._model, n, self._source, self._folder / str(n), log_file)
            for n, log_file in enumerate(logs)
        ]

    async def _until_there(self) -> None:
        """Waits for all servers of our own; if they are given by address, for the first one, and the others may follow
        later."""
        waiting = {server.first_try for server in self._servers}
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
            if self._vllm.urls:
                break
        for one in waiting:
            one.add_done_callback(lambda late: late.cancelled() or late.exception())

    # What all of them can do

    @property
    def _card(self) -> ModelCard:
        assert self._worker.card is not None
        return self._worker.card

    def check_lora(self, lora: LoraConfig) -> None:
        if lora.rank > self._vllm.max_lora_rank:
            raise Refusal(
                400,
                f"rank {lora.rank} is more than this model's vLLM supports; use at most "
                f"{self._vllm.max_lora_rank} (the server's setting vllm.max_lora_rank)",
            )
        for part in ("train_unembed", "train_mlp", "train_attn"):
            if getattr(lora, part) and not self._serves(part):
                raise Refusal(400, f"this model's vLLM cannot serve adapters with {part}; set {part}=False")
        if (card := self._worker.card) is not None:
            refuse_unserved(card, lora)

    def _serves(self, part: str) -> bool:
        """`part` is a flag of LoraConfig."""
        known = [server.abilities for server in self._servers if server.abilities is not None]
        return all(getattr(able, part) for able in known)

    def check(self, request: SampleRequest) -> None:
        context = min((server.context for server in self._servers if server.context), default=self._card.max_positions)
        check_request(request, ServedModelFacts(context, self._card.vocab_size, self._card.eos_token_ids))
