"""Builds a GRPO run from its config: environments, order of tasks, players, evaluation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from msgspec import Struct

from palestra.chat import ChatTokenizer
from palestra.config.train import DistillConfig, GrpoConfig
from palestra.environments.environment_set import EnvironmentSet
from palestra.environments.judging import Judges
from palestra.environments.task_order import TaskOrder
from palestra.rollouts.episodes.run import EpisodeRun
from palestra.rollouts.gym.player import GymPlayer, open_gym_players
from palestra.rollouts.judged import judged
from palestra.rollouts.local.following_limit import FollowingLimit
from palestra.rollouts.local.load_reader import open_load_reader
from palestra.rollouts.local.lockstep import BatchedRollouts
from palestra.rollouts.local.player import LocalRollouts, PlayerContext
from palestra.rollouts.rollout_loop import Environments, RolloutSettings
from palestra.rollouts.sources import RolloutSource
from palestra.runs.reader import RunStatus
from palestra.training.collecting.difficulty import TaskFilter
from palestra.training.collecting.endings import EndedRollouts
from palestra.training.collecting.own_reward import with_own_reward
from palestra.training.collecting.sync_collector import RequestMaker
from palestra.training.loops.evaluation import Evaluator
from palestra.training.loops.grpo import GrpoLoop, GrpoParts
from palestra.training.session import TrainingSession
from palestra.training.teachers import open_teachers
from palestra.types.rollouts import Task


class RolloutSources(Struct):
    """The sources of rollouts of a run."""

    train: RolloutSource
    eval: RolloutSource
    episodes: EpisodeRun | None = None
    """The run's episodes at the server; None if only this process plays."""
    following: FollowingLimit | None = None
    """How many rollouts are played at once, where the config does not say."""


def open_environments(config: GrpoConfig) -> EnvironmentSet:
    rollout = config.rollout
    return EnvironmentSet(
        config.environments,
        env_threads=rollout.env_threads,
        env_timeout_s=rollout.env_timeout_s,
        are_elsewhere=config.rollouts == "episodes" and not config.players,
    )


async def run_grpo(config: GrpoConfig, session: TrainingSession) -> RunStatus:
    with open_environments(config) as environments:
        async with AsyncExitStack() as stack:
            judges = await stack.enter_async_context(Judges.open(config.judges, config.environments, session.run.path))
            sources = await stack.enter_async_context(open_sources(config, session, environments))
            teachers = None
            if isinstance(config, DistillConfig):
                teachers = await stack.enter_async_context(open_teachers(config, session))
            order = _task_order(config, environments)
            state, task_filter = session.state, None
            if config.difficulty is not None:
                task_filter = TaskFilter(config.difficulty, config.eval.success, state.difficulty)
            requests = RequestMaker(
                order, config.seed, config.rollout.group_size, state.position, state.pending, task_filter
            )
            evaluator = None
            if config.eval.every and (tasks := eval_tasks(config, environments)):
                evaluator = Evaluator(
                    config.eval,
                    tasks,
                    judged(sources.eval, judges),
                    config.seed,
                    session.listener,
                    environments.aggregate,
                )
            ledger = sources.episodes.log if sources.episodes else None
            reporting = (judges, ledger, task_filter, sources.following)
            reporters = [part.take_metrics for part in reporting if part is not None]
            parts = GrpoParts(
                EndedRollouts(with_own_reward(judged(sources.train, judges), config.reward), config.rollout.endings),
                requests,
                evaluator,
                environments.aggregate,
                ledger,
                teachers,
                sources.episodes.publish if sources.episodes else None,
                reporters,
            )
            return await GrpoLoop(config, session, parts).run()


@asynccontextmanager
async def open_sources(
    config: GrpoConfig, session: TrainingSession, environments: EnvironmentSet
) -> AsyncIterator[RolloutSources]:
    if config.rollouts != "local":
        async with EpisodeRun.open(config, session, environments) as episodes:
            yield RolloutSources(episodes.source, episodes.eval_source, episodes)
        return
    settings = RolloutSettings.of(config.rollout, config.eval.temperature)
    async with open_gym_players(config, session) as gyms, open_limits(config, session) as (training, evaluating):
        sources = RolloutSources(
            open_source(config, session.tokenizer, environments, None, gyms, training),
            open_source(config, session.tokenizer, environments, settings, gyms, evaluating),
            following=training,
        )
        try:
            yield sources
        finally:
            await sources.train.close()
            await sources.eval.close()


def open_source(
    config: GrpoConfig,
    tokenizer: ChatTokenizer,
    environments: Environments,
    settings: RolloutSettings | None = None,
    gyms: Mapping[str, GymPlayer] | None = None,
    following: FollowingLimit | None = None,
) -> RolloutSource:
    """Opens the source of a config. Without `settings` those of training are used; evaluation passes
    `RolloutSettings.of(config.rollout, temperature)`. `following`: see `LocalRollouts`."""
    context = PlayerContext(tokenizer, environments, settings or RolloutSettings.of(config.rollout))
    return BatchedRollouts(context) if config.rollout.style == "batched" else LocalRollouts(context, gyms, following)


@asynccontextmanager
async def open_limits(
    config: GrpoConfig, session: TrainingSession
) -> AsyncIterator[tuple[FollowingLimit | None, FollowingLimit | None]]:
    """Opens the limits of rollouts at once for training and for evaluations, where the config leaves them to us."""
    if config.rollout.concurrency is not None or config.rollout.style == "batched":
        yield None, None
        return
    async with open_load_reader(session.url, config.model.name) as read:
        yield FollowingLimit(read), FollowingLimit(read)


def eval_tasks(config: GrpoConfig, environments: EnvironmentSet) -> list[Task]:
    return [task for _, tasks in environments.tasks("eval") for task in tasks[: config.eval.tasks]]


def _task_order(config: GrpoConfig, environments: EnvironmentSet) -> TaskOrder:
    found = environments.tasks("train")
    unshuffled = {place for place, (entry, _) in enumerate(found) if not entry.shuffle}
    return TaskOrder([(entry.weight, tasks) for entry, tasks in found], config.seed, unshuffled=unshuffled)
