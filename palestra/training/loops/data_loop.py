"""The loop of runs that train on a file: step, record, save, and evaluate from time to time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from palestra.config.train import RunConfig
from palestra.runs.listener import Stage, StageClock
from palestra.runs.reader import RunStatus
from palestra.training.batches.sft_examples import Example
from palestra.training.loops.lr_schedule import adam_at
from palestra.training.policy import PolicyUpdate
from palestra.training.session import TrainingSession
from palestra.types.rollouts import TrainSequence

Metrics = dict[str, float]


class StepOutcome(Struct):
    metrics: Metrics
    position: int
    """Position where the next batch begins."""


class Learner(Protocol):
    async def step(self, position: int) -> StepOutcome:
        """Makes one optimizer step on the batch at this position in the data."""
        ...


async def run_steps(
    config: RunConfig,
    session: TrainingSession,
    learner: Learner,
    *,
    evaluate: Callable[[], Awaitable[Metrics]] | None = None,
    eval_every: int = 0,
) -> RunStatus:
    """Runs from the step of the session's state to the last one. Evaluates before the first step, at the configured
    interval, and after the last step."""
    state = session.state
    while True:
        is_time = bool(eval_every) and _is_due(eval_every, state.step, config.steps)
        if evaluate is not None and is_time and state.evaluated != state.step:
            await _look(session, evaluate)
        if state.step >= config.steps:
            return RunStatus.DONE
        if await session.is_stopped(session.save):
            return RunStatus.STOPPED
        stepped = await learner.step(state.position)
        state.step, state.position = state.step + 1, stepped.position
        await _record(config, session, stepped.metrics)


async def _record(config: RunConfig, session: TrainingSession, metrics: Metrics) -> None:
    """Writes a step before its checkpoint: after a kill a step may be written twice, but it is never missing."""
    done = session.state.step
    session.run.write_metrics(done, metrics)
    await session.track(done, metrics)
    if _is_due(config.checkpoint.every, done, config.steps):
        await session.save()
    session.listener.step(done, metrics)
    session.advise()


async def _look(session: TrainingSession, evaluate: Callable[[], Awaitable[Metrics]]) -> None:
    done, metrics = session.state.step, await evaluate()
    session.run.write_metrics(done, metrics)
    await session.track(done, metrics)
    session.listener.evaluated(done, metrics)
    session.advise()
    session.state.evaluated = done
    await session.save_evaluation(metrics, session.save)


def _is_due(every: int, done: int, steps: int) -> bool:
    return done == steps or done % every == 0


async def finish_step(
    config: RunConfig,
    session: TrainingSession,
    batch: Sequence[TrainSequence],
    clock: StageClock,
    metrics: Mapping[str, float],
) -> Metrics:
    """Makes the optimizer step of a batch whose weights are set. Returns the step's metrics, in order: `metrics`, those
    of the optimizer, those of speed."""
    adam = adam_at(config.optimizer, session.state.step, config.steps)
    with clock.of(Stage.UPDATE, 1):
        update = await session.policy.update(batch, "cross_entropy", {}, adam)
    speed = speed_metrics(clock, sum(len(sequence.tokens) for sequence in batch))
    return {**metrics, **optimizer_metrics(update, adam.learning_rate), **speed}


def batch_metrics(examples: Sequence[Example], skipped: int) -> Metrics:
    return {
        "batch/sequences": float(len(examples)),
        "batch/trained_tokens": float(sum(example.trained for example in examples)),
        "batch/tokens": float(sum(len(example.sequence.tokens) for example in examples)),
        "batch/truncated": float(sum(example.is_cut for example in examples)),
        "batch/skipped": float(skipped),
    }


def optimizer_metrics(update: PolicyUpdate, learning_rate: float) -> Metrics:
    found = {"optim/lr": learning_rate}
    if "grad_norm" in update.metrics:
        found["optim/grad_norm"] = update.metrics["grad_norm"]
    return found


def speed_metrics(clock: StageClock, tokens: int) -> Metrics:
    """`tokens` counts all tokens of the batch, including those that are only context."""
    seconds: Mapping[str, float] = {**clock.seconds, "total": clock.total}
    found = {f"time/{stage}_s": spent for stage, spent in seconds.items()}
    rates = ((stage, seconds.get(stage, 0.0)) for stage in ("update", "total"))
    return found | {f"throughput/{stage}_tokens_per_s": tokens / spent for stage, spent in rates if spent > 0}
