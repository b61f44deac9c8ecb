"""The policy as a training loop sees it: it can be sampled, trained, published and saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from palestra.rollouts.policy_sampler import PolicySampler
from palestra.training.custom_functions import CustomLoss
from palestra.training.divergences import DivergenceLoss
from palestra.types import AdamParams
from palestra.types.rollouts import TrainSequence


class PolicyStart(Struct, kw_only=True):
    """The start of a policy: a new adapter, or the state that was saved at an address."""

    rank: int
    seed: int
    train_unembed: bool = True
    address: str | None = None
    with_optimizer: bool = True


class PolicyUpdate(Struct, kw_only=True):
    """The result of one pass over a batch."""

    metrics: dict[str, float]
    logprobs: list[list[float]]
    """For each sequence, the logprobs of `tokens[1:]` by the trainer's own forward pass, before the optimizer step."""
    entropies: list[list[float]] = []
    """Like `logprobs`: the entropy of the distribution from which each token was to be predicted, NaN where nothing was
    learned. Empty if the server does not report it."""
    custom: dict[str, float] = {}
    """Metrics of a loss of one's own."""


class Policy(Protocol):
    """A model in training. Every method raises PolicyError."""

    async def update(
        self,
        batch: Sequence[TrainSequence],
        loss: str | CustomLoss | DivergenceLoss,
        loss_config: dict[str, float],
        adam: AdamParams | None,
    ) -> PolicyUpdate:
        """Makes one optimizer step; without `adam`, adds to the gradient of the next one. For cross_entropy the
        advantages are the weights, for a divergence those of each token. Raises FunctionError if a loss of one's own
        fails."""
        ...

    async def forward(self, batch: Sequence[TrainSequence]) -> PolicyUpdate:
        """Computes cross entropy and changes nothing."""
        ...

    async def publish(self, version: int) -> PolicySampler:
        """Returns a sampler with the weights as they are now."""
        ...

    async def go_on(self, sampler: PolicySampler) -> None:
        """Lets samples of earlier weights that are under way go on with those of `sampler`, which was published."""
        ...

    async def base(self) -> PolicySampler:
        """Returns a sampler of the model without the adapter."""
        ...

    async def sampler_of(self, model: str) -> PolicySampler:
        """Returns a sampler of saved weights (`tinker://…`), whatever the policy has become since, or of another base
        model by its name at the server."""
        ...

    async def save(self, name: str, *, ttl_s: int | None = None) -> str:
        """Saves weights and optimizer, and returns the address to start from again. With `ttl_s` the server forgets
        them after this time, and an earlier state of this name is replaced."""
        ...

    async def restore(self, address: str) -> None:
        """Continues from weights and optimizer that were saved; a gradient that was accumulated is dropped."""
        ...

    async def delete(self, address: str) -> None: ...
