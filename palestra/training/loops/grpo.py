"""The GRPO loop: collect rollouts, compute advantages, update, publish weights, repeat."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from copy import deepcopy
from typing import Protocol

from msgspec import Struct

from palestra.config.train import EarlyStop, GrpoConfig
from palestra.endpoints.model_folders import SetupError
from palestra.rollouts.group_metrics import Aggregate
from palestra.rollouts.policy_sampler import PolicyError, PolicySampler, SamplingError
from palestra.rollouts.sources import RolloutLedger, RolloutSource
from palestra.runs.listener import Stage, StageClock
from palestra.runs.reader import RunStatus
from palestra.runs.run_state import RunState
from palestra.runs.writer import EventKind
from palestra.training.batches.grpo_batch import TrainingBatch, build_batch, to_sequence, trainable_rows
from palestra.training.collecting.async_collector import StreamingCollector
from palestra.training.collecting.sync_collector import AllRolloutsFailed, Collector, RequestMaker
from palestra.training.guarded_update import AppliedUpdate, PolicyUpdater
from palestra.training.loops.entropy_target import adapt_entropy_bonus, entropy_bonus
from palestra.training.loops.evaluation import Evaluator
from palestra.training.loops.lr_schedule import adam_at
from palestra.training.loops.step_metrics import step_metrics
from palestra.training.policy import PolicyUpdate
from palestra.training.row_scores import Teachers, TeacherScores, score_rows
from palestra.training.session import TrainingSession
from palestra.types import AdamParams
from palestra.types.rollouts import Branch, Group
from palestra.types.training import LOGPROB_ROUNDING
from palestra.util.suggest import did_you_mean

REFERENCE = "reference"
"""Begin of the names of weights that `penalty.kl` compares with."""
REFERENCE_TTL_S = 30 * 86_400
"""The server forgets such weights after this time: earlier checkpoints of a run may need earlier ones."""
BASE_SAMPLE = 16
"""Number of rows of a step that the base model scores if only the report needs it."""


class GrpoParts(Struct):
    """The parts of a run, beside its session; `grpo_setup` builds it."""

    source: RolloutSource
    requests: RequestMaker
    evaluator: Evaluator | None
    aggregate: Aggregate
    ledger: RolloutLedger | None = None
    """Keeps played groups until they are in a checkpoint."""
    teachers: Teachers | None = None
    """Those who score the rollouts of a distillation."""
    publish: Callable[[PolicySampler], Awaitable[None]] | None = None
    """Lets players elsewhere sample from new weights; None if all play in this process."""
    reporters: Sequence[Callable[[], dict[str, float]]] = ()
    """Functions that return metrics of what happened since their last call."""


class GroupCollector(Protocol):
    @property
    def pending(self) -> list[int]:
        """Positions in the order of tasks that were begun and not used."""
        ...

    async def collect(self, step: int, sampler: PolicySampler) -> list[Group]: ...


class GrpoLoop:
    def __init__(self, config: GrpoConfig, session: TrainingSession, parts: GrpoParts) -> None:
        self._config, self._session, self._parts = config, session, parts
        self._policy, self._state, self._listener = session.policy, session.state, session.listener
        self._updater = PolicyUpdater(config, session.policy, session.listener)
        self._resumable: RunState | None = None
        """The state before the first of the steps whose gradient is kept; None if there is none."""
        self._base: PolicySampler | None = None

    async def run(self) -> RunStatus:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._updater.close)
            collector = await self._open_collector(stack)
            self._listener.stage(Stage.SYNC, 0, 0)
            sampler = await self._policy.publish(self._state.step)
            while True:
                is_good_enough = await self._evaluate(sampler)
                if self._state.step >= self._config.steps:
                    return RunStatus.DONE
                if is_good_enough or await self._session.is_stopped(self._save_to_resume):
                    return RunStatus.STOPPED
                sampler = await self._step(collector, sampler)

    async def _open_collector(self, stack: AsyncExitStack) -> GroupCollector:
        source, requests = self._parts.source, self._parts.requests
        if not self._config.asynchronous.enabled:
            return Collector(self._config, source, requests, self._listener)
        go_on = self._go_on if self._config.asynchronous.continues else None
        collector = StreamingCollector(self._config, source, requests, self._listener, go_on)
        return await stack.enter_async_context(collector)

    async def _go_on(self, sampler: PolicySampler) -> None:
        """Lets rollouts under way go on with new weights: their later turns, then the turns that are being sampled."""
        if self._parts.publish is not None:
            await self._parts.publish(sampler)
        await self._policy.go_on(sampler)

    async def _step(self, collector: GroupCollector, sampler: PolicySampler) -> PolicySampler:
        version, clock = self._state.step, StageClock(self._listener)
        with clock.of(Stage.COLLECT):
            self._updater.save_ahead()
            groups = await self._collect(collector, sampler)
        with clock.of(Stage.SCORE):
            oldest = oldest_trained(self._config, version)
            rows = trainable_rows(groups, self._config, oldest)
            base_logprobs = await self._score(rows)
            taught = await self._score_by_teachers(groups, rows, sampler)
            own_logprobs = await self._own_logprobs(rows)
            bonus = entropy_bonus(self._config.algorithm.entropy, self._state)
            batch = build_batch(
                *(groups, self._config, base_logprobs, own_logprobs, taught.logprobs, taught.top),
                entropy_bonus=bonus,
                oldest=oldest,
            )
        with clock.of(Stage.UPDATE):
            adam = adam_at(self._config.optimizer, version - self._state.kept_steps, self._config.steps)
            applied = await self._update(groups, batch, adam)
        with clock.of(Stage.SYNC):
            sampler = await self._policy.publish(version + 1)
        self._state.step = version + 1
        self._state.kept_steps += applied.is_kept
        self._parts.requests.observe(groups)
        self._state.position, self._state.pending = self._parts.requests.position, collector.pending
        metrics = step_metrics(
            groups,
            batch,
            applied.updates,
            config=self._config,
            version=version,
            seconds={**clock.seconds, "total": clock.total},
            base_logprobs=base_logprobs,
            teacher_logprobs=taught.logprobs,
            aggregate=self._parts.aggregate,
        )
        metrics |= {"optim/lr": adam.learning_rate, **applied.metrics()}
        if bonus or self._config.algorithm.entropy.target is not None:
            metrics["entropy/bonus"] = bonus
        adapt_entropy_bonus(self._config.algorithm.entropy, self._state, metrics)
        for take_metrics in self._parts.reporters:
            metrics |= take_metrics()
        await self._record(groups, batch, applied.updates, metrics)
        return sampler

    async def _collect(self, collector: GroupCollector, sampler: PolicySampler) -> list[Group]:
        try:
            return await collector.collect(self._state.step, sampler)
        except AllRolloutsFailed as error:
            self._session.run.write_rollouts(self._state.step + 1, error.groups)
            raise

    async def _score(self, rows: list[Branch]) -> dict[str, list[float]]:
        """Scores rows with the base model: all that are trained on if a penalty needs it, else a few for the report."""
        if not self._config.penalty.kl:
            rows = rows[:: max(1, len(rows) // BASE_SAMPLE)][:BASE_SAMPLE]
        if not rows:
            return {}
        try:
            base = await self._reference()
            limit = self._config.data.max_sequence_length
            return await score_rows(rows, limit, base, self._listener)
        except (PolicyError, SamplingError) as error:
            if self._config.penalty.kl:
                raise
            self._listener.note(f"kl/base is missing in this step: {error}")
            return {}

    async def _reference(self) -> PolicySampler:
        """Opens what the policy is kept near: the base model, or the policy as it was some steps ago. The state names
        its address, so that a resumed run compares with the same weights."""
        state, every = self._state, self._config.penalty.kl_reference_every
        if every is None or not self._config.penalty.kl:
            self._base = self._base or await self._policy.base()
            return self._base
        if not state.reference or state.step % every == 0:
            state.reference = await self._policy.save(f"{REFERENCE}_{state.step:06d}", ttl_s=REFERENCE_TTL_S)
            self._base = None
        self._base = self._base or await self._policy.sampler_of(state.reference)
        return self._base

    async def _score_by_teachers(
        self, groups: list[Group], rows: list[Branch], sampler: PolicySampler
    ) -> TeacherScores:
        if (teachers := self._parts.teachers) is None:
            return TeacherScores()
        return await teachers.score(groups, rows, self._config.data.max_sequence_length, self._listener, sampler)

    async def _own_logprobs(self, rows: list[Branch]) -> dict[str, list[float]] | None:
        """Returns the trainer's own logprobs of all rows if corrections compare them with the sampler's, otherwise of
        those for which the sampler's cannot be used. Tinker's logprobs are those at the sampling temperature, its
        losses compare with those at temperature 1. Where the two differ, the ratio would be wrong for every token.
        Minibatches after the first train weights that have moved: they need logprobs without the sampler's rounding."""
        algorithm = self._config.algorithm
        is_corrected = algorithm.correction.is_on
        has_moved = algorithm.minibatches > 1 and not self._config.asynchronous.enabled
        is_needed = is_corrected or has_moved or algorithm.observation_loss > 0
        rows = [row for row in rows if is_needed or row.temperature != 1.0]
        if not rows:
            return {} if is_corrected else None
        sequences = [to_sequence(row, 0.0, self._config.data.max_sequence_length) for row in rows]
        self._listener.stage(Stage.SCORE, 0, len(sequences))
        scored = await self._policy.forward(sequences)
        found = {row.id: [0.0, *own] for row, own in zip(rows, scored.logprobs, strict=True)}
        if not is_corrected:
            for row, sequence in zip(rows, sequences, strict=True):
                if row.temperature == 1.0:
                    found[row.id] = unrounded(sequence.logprobs, found[row.id], sequence.mask)
        return found

    async def _update(self, groups: list[Group], batch: TrainingBatch, adam: AdamParams) -> AppliedUpdate:
        if not self._updater.has_kept_gradient:
            self._resumable = deepcopy(self._state)
        applied = await self._updater.update(groups, batch, adam, self._state.step)
        if not self._updater.has_kept_gradient:
            self._resumable = None
        if applied.undone:
            self._report_undone(applied)
        return applied

    def _report_undone(self, applied: AppliedUpdate) -> None:
        step, bound = self._state.step + 1, self._config.update_guard.max_kl
        found = ", ".join(f"{kl:.2g}" for kl in applied.undone)
        outcome = (
            "the step was skipped" if applied.is_skipped else f"repeated at 1/{2 ** len(applied.undone)} of its size"
        )
        text = f"step {step}: the update was undone (KL {found} per token, {bound:g} allowed); {outcome}"
        self._session.run.event(
            EventKind.UNDONE, step=step, kl=applied.undone, skipped=applied.is_skipped, message=text
        )
        self._listener.note(text)

    async def _record(
        self, groups: list[Group], batch: TrainingBatch, updates: list[PolicyUpdate], metrics: dict[str, float]
    ) -> None:
        """Writes a step before its checkpoint: after a kill a step may be written twice, but it is never missing."""
        done, session = self._state.step, self._session
        scored = [logprobs for update in updates for logprobs in update.logprobs]
        entropies = [values for update in updates for values in update.entropies]
        kept = batch.sequences if self._config.keep_tokens else None
        session.run.write_rollouts(done, groups, kept, scored, entropies)
        session.run.write_metrics(done, metrics)
        await session.track(done, metrics)
        is_last = done == self._config.steps
        if self._is_due(self._config.checkpoint.every) and (is_last or not self._updater.has_kept_gradient):
            await self._save()
        self._listener.step(done, metrics)
        session.advise()

    async def _save(self) -> None:
        """Saves a checkpoint with the cursor, before the server may forget the groups up to it."""
        ledger = self._parts.ledger
        if ledger is not None:
            self._state.cursor = ledger.settled(self._state)
        await self._session.save()
        if ledger is not None:
            await ledger.commit(self._state.cursor)

    async def _save_to_resume(self) -> None:
        """Saves a run that is asked to stop. While a gradient is kept, that is the state before: the weights are the
        same, and the steps since are played again."""
        if self._resumable is not None:
            self._state = self._session.state = self._resumable
        await self._save()

    async def _evaluate(self, sampler: PolicySampler) -> bool:
        """Evaluates if it is due and not done yet. Returns True if the run is good enough, or has stopped improving."""
        done, evaluator, rule = self._state.step, self._parts.evaluator, self._config.early_stop
        if evaluator is None or self._state.evaluated == done or not self._is_due(self._config.eval.every):
            return False
        groups, metrics = await evaluator.evaluate(done, sampler)
        self._session.run.write_eval(done, groups, metrics)
        await self._session.track(done, metrics)
        self._listener.evaluated(done, metrics)
        self._session.advise()
        is_over = rule is not None and should_stop(rule, metrics, self._state)
        self._state.evaluated = done
        may_save = is_over or done == self._config.steps or not self._updater.has_kept_gradient
        await self._session.save_evaluation(metrics, self._save, is_last=is_over, may_save=may_save)
        return is_over

    def _is_due(self, every: int) -> bool:
        done = self._state.step
        return done == self._config.steps or (every > 0 and done % every == 0)


def oldest_trained(config: GrpoConfig, version: int) -> int:
    """Returns the oldest version whose tokens are trained into the weights of this one. Where rollouts do not continue
    with new weights, the collector leaves out whole groups."""
    return max(0, version - config.asynchronous.max_staleness) if config.asynchronous.continues else 0


def unrounded(sampler: Sequence[float], trainer: Sequence[float], mask: Sequence[bool]) -> list[float]:
    """Returns the trainer's logprobs where the sampler's differ by rounding alone or nothing was sampled, and the
    sampler's elsewhere."""
    return [
        drawn if sampled and abs(own - drawn) >= LOGPROB_ROUNDING else own
        for drawn, own, sampled in zip(sampler, trainer, mask, strict=True)
    ]


def should_stop(rule: EarlyStop, metrics: dict[str, float], state: RunState) -> bool:
    value = metrics.get(rule.metric)
    if value is None:
        hint = did_you_mean(rule.metric, sorted(metrics))
        raise SetupError(f"early_stop.metric: an evaluation has no {rule.metric!r}; {hint}")
    if state.best is None or value > state.best:
        state.best, state.evaluations_since_best = value, 0
    else:
        state.evaluations_since_best += 1
    if rule.at_least is not None and value >= rule.at_least:
        return True
    return rule.patience is not None and state.evaluations_since_best >= rule.patience
