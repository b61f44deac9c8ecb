"""A GRPO run from its config: environments, order of tasks, players, evaluation.

Owns: what the loop is given. Never touches: its steps.
"""

from __future__ import annotations

from palestra.config.train import GrpoConfig
from palestra.environments.order import TaskOrder
from palestra.environments.sets import EnvironmentSet
from palestra.training.evaluation import Evaluator
from palestra.training.grpo import GrpoLoop, Parts
from palestra.training.local import open_source
from palestra.training.player import RolloutSettings
from palestra.training.requests import RequestMaker
from palestra.training.run_reader import RunStatus
from palestra.training.session import Session
from palestra.types.rollouts import Task


def open_environments(config: GrpoConfig) -> EnvironmentSet:
    rollout = config.rollout
    return EnvironmentSet(config.environments, env_threads=rollout.env_threads, env_timeout_s=rollout.env_timeout_s)


async def run_grpo(config: GrpoConfig, session: Session) -> RunStatus:
    with open_environments(config) as environments:
        source = open_source(config, session.tokenizer, environments)
        settings = RolloutSettings.of(config.rollout, config.eval.temperature)
        eval_source = open_source(config, session.tokenizer, environments, settings)
        order = TaskOrder([(entry.weight, tasks) for entry, tasks in environments.tasks("train")], config.seed)
        state = session.state
        requests = RequestMaker(order, config.seed, config.rollout.group_size, state.position, state.pending)
        evaluator = None
        if config.eval.every and (tasks := eval_tasks(config, environments)):
            evaluator = Evaluator(
                config.eval, tasks, eval_source, config.seed, session.listener, environments.aggregate
            )
        try:
            return await GrpoLoop(config, session, Parts(source, requests, evaluator, environments.aggregate)).run()
        finally:
            await source.close()
            await eval_source.close()


def eval_tasks(config: GrpoConfig, environments: EnvironmentSet) -> list[Task]:
    return [task for _, tasks in environments.tasks("eval") for task in tasks[: config.eval.tasks]]
