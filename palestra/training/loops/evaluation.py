"""Evaluates the policy on held-out tasks."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.config.train import EvalConfig
from palestra.rollouts.eval_metrics import eval_metrics
from palestra.rollouts.group_metrics import Aggregate, mean_by_name
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.rollouts.seeds import group_seeds
from palestra.rollouts.sources import RolloutSource
from palestra.runs.listener import RunListener, Stage
from palestra.types.rollouts import Group, GroupRequest, Task


class Evaluator:
    def __init__(
        self,
        config: EvalConfig,
        tasks: Sequence[Task],
        source: RolloutSource,
        seed: int,
        listener: RunListener,
        aggregate: Aggregate = mean_by_name,
    ) -> None:
        self._config, self._tasks, self._source, self._seed, self._listener = config, tasks, source, seed, listener
        self._aggregate = aggregate

    async def evaluate(self, step: int, sampler: PolicySampler) -> tuple[list[Group], dict[str, float]]:
        requests = [self._request(task, step) for task in self._tasks]
        groups: dict[str, Group] = {}
        self._listener.stage(Stage.EVAL, 0, len(requests))
        async for group in self._source.play(requests, sampler):
            groups[group.id] = group
            self._listener.stage(Stage.EVAL, len(groups), len(requests))
        ordered = [groups[request.id] for request in requests]
        ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= self._config.samples]
        return ordered, eval_metrics(ordered, ks, self._config.success, self._aggregate)

    def _request(self, task: Task, step: int) -> GroupRequest:
        seeds = group_seeds(self._config.samples, self._seed, "eval", task.environment, task.id)
        return GroupRequest(id=f"eval-{task.environment}-{task.id}", task=task, step=step, seeds=seeds)
