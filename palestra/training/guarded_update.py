"""Applies the batches of a run's steps to its policy, and undoes an update that moves the policy too far.

A step with too few informative groups keeps its gradient for the next one instead of stepping on noise. An update is
measured by scoring rows that were played, those of groups without variance too, before and after it:

    KL per token = mean over sampled tokens of (logprob after - logprob before)^2 / 2

which is the KL divergence to second order, never negative, and not carried away by one token that became likely. Above
the bound, weights and optimizer return to the state saved before, and the step is repeated at half the learning rate.
That state is saved while the step's rollouts are played: with large adapters it takes as long as the update itself.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from palestra.config.train import DistillConfig, GrpoConfig
from palestra.rollouts.policy_sampler import PolicyError
from palestra.runs.listener import RunListener, Stage
from palestra.training.batches.compared_rewards import is_zero_variance
from palestra.training.batches.grpo_batch import TrainingBatch, scorable_rows, to_sequence
from palestra.training.custom_functions import CustomLoss, custom_loss
from palestra.training.divergences import DivergenceLoss
from palestra.training.policy import Policy, PolicyUpdate
from palestra.types import AdamParams
from palestra.types.rollouts import Branch, Group, TrainSequence

RETRIES = 3
"""How often an update that went too far is repeated, each time at half the learning rate."""
BEFORE = "before_update"
"""Name of the state that an update is undone to; each step replaces that of the one before."""
BEFORE_TTL_S = 7 * 86_400
"""The server forgets the state of a run that was killed after this time."""


class AppliedUpdate(Struct, kw_only=True):
    """The outcome of a step's batch."""

    updates: list[PolicyUpdate]
    """One for each minibatch, of the attempt that counts."""
    is_kept: bool = False
    """Whether the gradient was kept for the next step, and no optimizer step was made."""
    informative: int = 0
    """Number of groups that something can be learned from."""
    kl: float | None = None
    """KL per token of the update that counts; None if it was not measured."""
    undone: list[float] = []
    """KL per token of the attempts that were undone."""
    is_skipped: bool = False
    """Whether all attempts were undone."""
    guard_s: float = 0.0
    """Seconds of waiting for the saved state, measuring and undoing."""

    def metrics(self) -> dict[str, float]:
        found = {"groups/informative": float(self.informative), "optim/kept": float(self.is_kept)}
        if self.kl is not None:
            found |= {
                "guard/kl": self.kl,
                "guard/kl_first": (self.undone or [self.kl])[0],
                "guard/undone": float(len(self.undone)),
                "guard/skipped": float(self.is_skipped),
                "time/guard_s": self.guard_s,
            }
        return found


class PolicyUpdater:
    def __init__(self, config: GrpoConfig, policy: Policy, listener: RunListener) -> None:
        self._config, self._policy, self._listener = config, policy, listener
        self._loss = _loss_of(config)
        self._kept: list[TrainingBatch] = []
        """Batches whose gradients the server holds since the last optimizer step."""
        self._kept_rows: list[Branch] = []
        self._saving: asyncio.Task[str] | None = None
        """Saves the state that the next update is undone to."""

    @property
    def has_kept_gradient(self) -> bool:
        """Whether a gradient is kept, which a checkpoint would lose: save only what `_save_to_resume` of the loop
        saves."""
        return bool(self._kept)

    def save_ahead(self) -> None:
        """Begins to save the state that the next update is undone to. Nothing may train until then."""
        if self._saving is None and self._config.update_guard.enabled:
            self._saving = asyncio.create_task(self._save(), name="save-before-update")

    async def close(self) -> None:
        """Ends a save under way, whose step is not made any more."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.cancel()
            await asyncio.gather(saving, return_exceptions=True)

    async def _save(self) -> str:
        return await self._policy.save(BEFORE, ttl_s=BEFORE_TTL_S)

    async def _saved(self) -> str:
        saving, self._saving = self._saving, None
        if saving is not None:
            with suppress(PolicyError):  # it is tried again, when nothing else is under way
                return await saving
        return await self._save()

    async def update(
        self, groups: Sequence[Group], batch: TrainingBatch, adam: AdamParams, version: int
    ) -> AppliedUpdate:
        """`version`: of the weights that the batch trains."""
        informative = sum(not is_zero_variance(group, self._config) for group in groups)
        rows = scorable_rows(groups, self._config)
        if not batch.minibatches or informative < self._config.min_informative_groups:
            updates = await self._passes(batch, None)
            if batch.minibatches:
                self._kept.append(batch)
                self._kept_rows += rows
            return AppliedUpdate(updates=updates, is_kept=True, informative=informative)
        if self._config.update_guard.enabled:
            applied = await self._guarded(batch, adam, [*self._kept_rows, *rows], version)
        else:
            applied = AppliedUpdate(updates=await self._passes(batch, adam))
        self._kept, self._kept_rows = [], []
        applied.informative = informative
        return applied

    async def _guarded(
        self, batch: TrainingBatch, adam: AdamParams, rows: Sequence[Branch], version: int
    ) -> AppliedUpdate:
        begin = time.monotonic()
        self._listener.stage(Stage.GUARD, 0, 0)
        address = await self._saved()
        sequences = await self._before(self._choose(rows, version), version)
        undone: list[float] = []
        while True:
            step_begin = time.monotonic()
            updates = await self._passes(batch, adam)
            step_s = time.monotonic() - step_begin
            self._listener.stage(Stage.GUARD, 0, len(sequences))
            scored = await self._policy.forward(sequences)
            kl = update_kl(sequences, scored.logprobs)
            if kl <= self._config.update_guard.max_kl:  # not so if it is NaN
                guard_s = time.monotonic() - begin - step_s
                return AppliedUpdate(updates=updates, kl=kl, undone=undone, guard_s=guard_s)
            undone.append(kl)
            await self._policy.restore(address)
            if len(undone) > RETRIES:
                guard_s = time.monotonic() - begin
                return AppliedUpdate(updates=updates, kl=0.0, undone=undone, is_skipped=True, guard_s=guard_s)
            adam = replace(adam, learning_rate=adam.learning_rate / 2)
            for kept in self._kept:  # the server forgot their gradients with the state
                await self._passes(kept, None)

    async def _passes(self, batch: TrainingBatch, adam: AdamParams | None) -> list[PolicyUpdate]:
        """Makes an optimizer step for each minibatch; without `adam`, keeps their gradients."""
        config, updates = self._config.algorithm.loss_config, []
        for done, minibatch in enumerate(batch.minibatches):
            self._listener.stage(Stage.UPDATE, done, len(batch.minibatches))
            updates.append(await self._policy.update(minibatch, self._loss, config, adam))
        self._listener.stage(Stage.UPDATE, len(updates), len(batch.minibatches))
        return updates

    def _choose(self, rows: Sequence[Branch], version: int) -> list[Branch]:
        count = min(len(rows), self._config.update_guard.rows)
        return random.Random(f"guard/{self._config.seed}/{version}").sample(rows, count)

    async def _before(self, rows: Sequence[Branch], version: int) -> list[TrainSequence]:
        """Returns the rows with their logprobs under the policy as it is: those of the sampler if these weights drew
        them at temperature 1, else by a forward pass."""
        limit = self._config.data.max_sequence_length
        sequences = [to_sequence(row, 0.0, limit) for row in rows]
        others = [sequence for row, sequence in zip(rows, sequences, strict=True) if not is_on_policy(row, version)]
        if others:
            scored = await self._policy.forward(others)
            for sequence, logprobs in zip(others, scored.logprobs, strict=True):
                sequence.logprobs = [0.0, *logprobs]
        return sequences


def _loss_of(config: GrpoConfig) -> str | CustomLoss | DivergenceLoss:
    if isinstance(config, DistillConfig) and not config.distillation.is_sampled:
        return DivergenceLoss(config.distillation)
    return custom_loss(config.algorithm) or config.algorithm.loss


def is_on_policy(row: Branch, version: int) -> bool:
    """Whether its logprobs are those of these weights."""
    return row.temperature == 1.0 and all(turn.version == turn.newest_version == version for turn in row.turns)


def update_kl(sequences: Sequence[TrainSequence], after: Sequence[Sequence[float]]) -> float:
    """`after`: for each sequence, the logprobs of `tokens[1:]`. Returns 0 if nothing was sampled."""
    changes = [
        new - old
        for sequence, logprobs in zip(sequences, after, strict=True)
        for old, new, sampled in zip(sequence.logprobs[1:], logprobs, sequence.mask[1:], strict=True)
        if sampled
    ]
    return math.fsum(change * change for change in changes) / (2 * len(changes)) if changes else 0.0
