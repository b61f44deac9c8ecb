"""A place that samples: what a set of replicas knows of each, whether it is a process of ours or vLLM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from palestra.server.core.checkpoints.adapter_transfers import TransferredAdapter
from palestra.server.replicas.loaded_adapters import LoadedAdapters
from palestra.types.engine import Sample, Sampled, Streamed

Tell = Callable[[Streamed], None]


class Replica(ABC):
    adapters: LoadedAdapters

    def __init__(self, number: int, *, max_in_flight: int):
        self.number, self._max_in_flight = number, max_in_flight
        self.is_up = False
        """Whether it may be sent samples."""
        self.trouble = ""
        """Why it is not up."""
        self.requests = self.sequences = 0
        """Number of requests that it has, and of the sequences that they ask for."""
        self.queued = 0
        """Requests that it had not begun at its last report."""

    @property
    @abstractmethod
    def where(self) -> str:
        """The replica's name or address, for messages."""

    @property
    def is_free(self) -> bool:
        return self.is_up and self.requests < self._max_in_flight

    @property
    def slots(self) -> int:
        """Number of requests that it can take now."""
        return self._max_in_flight - self.requests if self.is_up else 0

    def doubt(self) -> None:
        """Called if a request got no answer: checks the replica now rather than later."""
        return

    def stand_in(self) -> TransferredAdapter | None:
        """Returns an adapter for the base model, if the replica cannot sample from that itself."""
        return None

    @abstractmethod
    async def sample(self, sample: Sample, adapter: str | None, tell: Tell) -> Sampled:
        """Samples once; `adapter` is the name of one that is loaded. Raises ReplicaError."""

    @abstractmethod
    async def stop(self) -> None: ...
