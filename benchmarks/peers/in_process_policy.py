"""A policy in this process, on the engine's backend, for benchmarks that compare how runs learn and not how fast they
are: the same player, batches, losses and optimizer as a run's, without a server between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palestra.engine.torch_backend import TorchBackend
from palestra.model import Adapter, TrainItem, encode
from palestra.rollouts.policy_sampler import TopScores
from palestra.training.custom_functions import CustomLoss
from palestra.training.policy import PolicyUpdate
from palestra.types import AdamParams, Datum, LoraConfig, SampledSequence, SampleRequest, SamplingParams
from palestra.types.rollouts import TrainSequence


class InProcessSampler:
    def __init__(self, policy: InProcessPolicy, weights: Adapter, version: int) -> None:
        self._policy, self.weights, self.version = policy, weights, version
        self.model = f"in-process-{version}"

    async def sample(
        self, prompt: Sequence[int], params: SamplingParams, count: int = 1, pictures: Any = ()
    ) -> list[SampledSequence]:
        return await self._policy.sample(
            SampleRequest(prompt=tuple(prompt), params=params, num_samples=count), self.weights
        )

    async def base_model(self) -> str:
        return "in-process"

    async def score(self, tokens: Sequence[int], pictures: Any = ()) -> list[float]:
        raise NotImplementedError("nothing here is scored")

    async def score_top(self, tokens: Sequence[int], k: int, pictures: Any = ()) -> TopScores:
        raise NotImplementedError("nothing here is scored")


class InProcessPolicy:
    """Requests that arrive together are sampled together."""

    def __init__(self, backend: TorchBackend, lora: LoraConfig) -> None:
        self._backend, self.lora = backend, lora
        self.adapter = backend.create(lora)
        self._waiting: dict[int, asyncio.Future[list[SampledSequence]]] = {}
        self._frozen: Adapter | None = None

    async def sample(self, request: SampleRequest, weights: Adapter) -> list[SampledSequence]:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._advance, loop)
        future = self._waiting[self._backend.submit(request, weights)] = loop.create_future()
        return await future

    def _advance(self, loop: asyncio.AbstractEventLoop) -> None:
        done = self._backend.sample_step()
        for number, result in done.finished:
            self._waiting.pop(number).set_result(result.sequences)
        for number, error in done.failed:
            self._waiting.pop(number).set_exception(error)
        if self._waiting:
            loop.call_soon(self._advance, loop)

    async def publish(self, version: int) -> InProcessSampler:
        if self._frozen is not None:
            self._backend.free(self._frozen)
        self._frozen = self._backend.freeze(self.adapter)
        return InProcessSampler(self, self._frozen, version)

    async def update(
        self,
        batch: Sequence[TrainSequence],
        loss: str | CustomLoss,
        loss_config: dict[str, float],
        adam: AdamParams | None,
    ) -> PolicyUpdate:
        assert isinstance(loss, str), "losses of one's own are not compared here"
        items = [TrainItem(self.adapter, datum_of(sequence, loss), loss, loss_config) for sequence in batch]
        results = self._backend.trainer.forward_backward(items)
        if adam is not None:
            self._backend.optim_step({self.adapter: adam})
        return PolicyUpdate(metrics={}, logprobs=[one.logprobs.tolist() for one in results])

    async def forward(self, batch: Sequence[TrainSequence]) -> PolicyUpdate:
        items = [TrainItem(self.adapter, datum_of(sequence, "cross_entropy")) for sequence in batch]
        results = self._backend.trainer.forward(items)
        return PolicyUpdate(metrics={}, logprobs=[one.logprobs.tolist() for one in results])


def datum_of(sequence: TrainSequence, loss: str) -> Datum:
    def column(values: Sequence[float]) -> NDArray[np.float32]:
        return np.asarray(values[1:], np.float32)

    inputs = {"target_tokens": encode(np.asarray(sequence.tokens[1:], np.int64))}
    if loss == "cross_entropy":
        inputs["weights"] = encode(column(sequence.advantages))
    else:
        inputs |= {
            "logprobs": encode(column(sequence.logprobs)),
            "advantages": encode(column(sequence.advantages)),
        }
    return Datum.of_tokens(sequence.tokens[:-1], **inputs)
