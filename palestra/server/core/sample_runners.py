"""Runners that sample for a base model: its own worker, or a separate sampler that gets the weights.

Owns: the interface of both. Never touches: futures, what is sampled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from palestra.server.core.workers import WorkerHandle
from palestra.types import LoraConfig, SampleRequest
from palestra.types.engine import CancelSample, DropSamplers, KeepSampler, Operation, SampleWeights, Stats


class SampleRunner(ABC):
    """Results go to `Sampling`, as those of a worker do."""

    dies_with_worker = False
    """Its samples are lost with the worker, and sent again to the next one."""

    async def start(self) -> None:
        """When the worker is there. WorkerError if it cannot."""
        return

    async def stop(self) -> None:
        return

    @property
    @abstractmethod
    def is_up(self) -> bool:
        """Whether samples asked for now are sampled now."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes samples now, to sample them some time; else they wait."""
        return True

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Samples that it was given and has not begun, as far as it knows."""

    def on_stats(self, stats: Stats) -> None:
        """The worker tells of itself."""
        return

    def check_lora(self, lora: LoraConfig) -> None:
        """Refuses what it could not sample from."""
        return

    def check(self, request: SampleRequest) -> None:
        """Refuses what it cannot do; what is refused later is told as the result."""
        return

    @abstractmethod
    def send(self, request_id: str, message: bytes) -> None:
        """`Sample`, encoded."""

    @abstractmethod
    def cancel(self, request_id: str) -> None: ...

    @abstractmethod
    def keeping(self, sampler_id: str) -> Operation:
        """What the worker does to freeze a model's weights for it."""

    def prepare(self, weights: SampleWeights) -> None:
        """These are there, and will be sampled from soon."""
        return

    @abstractmethod
    def drop(self, sampler_ids: list[str]) -> None:
        """Drops frozen weights that nobody will ask for again."""

    def sweep(self) -> None:
        """Files that nobody needs any more go. In a thread."""
        return


class WorkerRunner(SampleRunner):
    """The worker that trains also samples, in turns."""

    dies_with_worker = True

    def __init__(self, worker: WorkerHandle, is_held: Callable[[WorkerHandle], bool]):
        self._worker, self._is_held = worker, is_held
        """`is_held`: whether samples have to wait for the sake of training."""
        self._waiting = 0

    @property
    def is_up(self) -> bool:
        return self._worker.link.is_up

    @property
    def is_ready(self) -> bool:
        return self.is_up and not self._is_held(self._worker)

    @property
    def waiting(self) -> int:
        return self._waiting

    def on_stats(self, stats: Stats) -> None:
        self._waiting = stats.waiting_samples

    def send(self, request_id: str, message: bytes) -> None:
        self._worker.link.send_encoded(message)

    def cancel(self, request_id: str) -> None:
        self._worker.link.send(CancelSample(request_id=request_id))

    def keeping(self, sampler_id: str) -> Operation:
        return KeepSampler(sampler_id=sampler_id)

    def drop(self, sampler_ids: list[str]) -> None:
        self._worker.link.send(DropSamplers(sampler_ids=sampler_ids))
