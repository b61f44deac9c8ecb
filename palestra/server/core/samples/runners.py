"""Runners that sample for a base model: its own worker, or a separate sampler that gets the weights.

Owns: the interface of both. Never touches: futures, what is sampled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.types import LoraConfig, SampleRequest
from palestra.types.engine import (
    CancelSample,
    ChangeWeights,
    DropSamplers,
    KeepSampler,
    Operation,
    SampleWeights,
    Stats,
)


@dataclass(frozen=True, slots=True)
class RunnerLoad:
    """How busy a runner was at its last report."""

    waiting: int
    running: int | None = None
    """Sequences that have a row; None: not known."""
    kv_used: float = 0.0
    cache_tokens: int = 0
    """Tokens that the cache can hold; 0: not known."""


class SampleRunner(ABC):
    """Samples for a base model. Results are passed to `SamplingRequests`, like those of a worker."""

    dies_with_worker = False
    """Whether its samples are lost with the worker, and sent again to the next one."""
    changes_weights = False
    """Whether a sample of it can go on with other weights; otherwise it ends on those that it began with."""

    async def start(self) -> None:
        """Called when the worker is up. Raises WorkerError if it cannot start."""
        return

    async def stop(self) -> None:
        return

    @property
    @abstractmethod
    def is_up(self) -> bool:
        """Whether samples that are requested now are sampled now."""

    @property
    def is_ready(self) -> bool:
        """Whether it accepts samples now, to sample them some time; otherwise they wait."""
        return True

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of samples that it has received and not begun, as far as it knows."""

    @property
    def load(self) -> RunnerLoad:
        return RunnerLoad(self.waiting)

    def on_stats(self, stats: Stats) -> None:
        """Takes the worker's report about itself."""
        return

    def on_worker_ready(self) -> None:
        """Called when the worker is another one, or can be asked for weights again."""
        return

    def check_lora(self, lora: LoraConfig) -> None:
        """Refuses an adapter that it could not sample from."""
        return

    def check(self, request: SampleRequest) -> None:
        """Refuses what it cannot do; a later refusal is sent as the result."""
        return

    @abstractmethod
    def send(self, request_id: str, message: bytes) -> None:
        """Sends an encoded `Sample` message."""

    @abstractmethod
    def cancel(self, request_id: str) -> None: ...

    def change_weights(self, change: ChangeWeights) -> None:
        """Lets samples that it has go on with other weights, if `changes_weights`."""
        raise NotImplementedError

    @abstractmethod
    def keeping(self, sampler_id: str) -> Operation:
        """Returns the operation by which the worker freezes a model's weights for it."""

    def prepare(self, weights: SampleWeights) -> None:
        """Called when weights exist that will be sampled from soon."""
        return

    @abstractmethod
    def drop(self, sampler_ids: list[str]) -> None:
        """Drops frozen weights that will not be used again."""


class WorkerRunner(SampleRunner):
    """The worker that trains also samples, in turns."""

    dies_with_worker = True
    changes_weights = True

    def __init__(self, worker: WorkerSupervisor, is_held: Callable[[WorkerSupervisor], bool]):
        self._worker, self._is_held = worker, is_held
        """`is_held` says whether samples have to wait because of training."""
        self._stats = Stats()

    @property
    def is_up(self) -> bool:
        return self._worker.link.is_up

    @property
    def is_ready(self) -> bool:
        return self.is_up and not self._is_held(self._worker)

    @property
    def waiting(self) -> int:
        return self._stats.waiting_samples

    @property
    def load(self) -> RunnerLoad:
        stats = self._stats
        return RunnerLoad(stats.waiting_samples, stats.running_samples, stats.kv_used, stats.cache_tokens)

    def on_stats(self, stats: Stats) -> None:
        self._stats = stats

    def send(self, request_id: str, message: bytes) -> None:
        self._worker.link.send_encoded(message)

    def cancel(self, request_id: str) -> None:
        self._worker.link.send(CancelSample(request_id=request_id))

    def change_weights(self, change: ChangeWeights) -> None:
        self._worker.link.send(change)

    def keeping(self, sampler_id: str) -> Operation:
        return KeepSampler(sampler_id=sampler_id)

    def drop(self, sampler_ids: list[str]) -> None:
        self._worker.link.send(DropSamplers(sampler_ids=sampler_ids))
