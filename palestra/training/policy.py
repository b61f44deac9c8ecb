"""The policy as a training loop sees it: it can be sampled, trained, published and saved.

Owns: the protocol between loops and the engine. Never touches: how any of it is done (`tinker_policy` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from palestra.types import AdamParams, SampledSequence, SamplingParams
from palestra.types.rollouts import TrainSequence


class PolicyError(Exception):
    """The engine refused or is gone: the run ends here, and can be resumed."""


class ServerUnreachable(PolicyError, ConnectionError):
    """Nobody answers at the server's address."""


class SamplingError(Exception):
    """One request could not be answered, and asking again at once will not help."""


class PolicySampler(Protocol):
    """Weights that do not change any more."""

    @property
    def version(self) -> int: ...

    @property
    def model(self) -> str:
        """What the server's model endpoint calls them."""
        ...

    async def sample(self, prompt: Sequence[int], params: SamplingParams, count: int = 1) -> list[SampledSequence]:
        """Raises SamplingError."""
        ...

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """The logprob of each token but the first, which gets 0. Raises SamplingError."""
        ...


class PolicyStart(Struct, kw_only=True):
    """What a policy begins with: a fresh adapter, or what was saved at an address."""

    rank: int
    seed: int
    train_unembed: bool = True
    address: str | None = None
    with_optimizer: bool = True


class PolicyUpdate(Struct, kw_only=True):
    """What one pass over a batch found."""

    metrics: dict[str, float]
    logprobs: list[list[float]]
    """For each sequence, of `tokens[1:]` by the trainer's own forward, before any step."""


class Policy(Protocol):
    """Every method raises PolicyError."""

    async def update(
        self, batch: Sequence[TrainSequence], loss: str, loss_config: dict[str, float], adam: AdamParams
    ) -> PolicyUpdate:
        """One optimizer step. For cross_entropy the advantages are the weights."""
        ...

    async def forward(self, batch: Sequence[TrainSequence]) -> PolicyUpdate:
        """Cross entropy, changing nothing."""
        ...

    async def publish(self, version: int) -> PolicySampler:
        """Freeze the weights as they are now."""
        ...

    async def base(self) -> PolicySampler:
        """The model without the adapter."""
        ...

    async def frozen(self, address: str) -> PolicySampler:
        """Weights as they were saved, whatever has become of the policy since."""
        ...

    async def save(self, name: str) -> str:
        """Weights and optimizer; the address to start from again."""
        ...

    async def delete(self, address: str) -> None: ...
