"""A reward profile: how hard each task is, from a collection with repeats."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import orjson
from msgspec import Struct

from palestra.gym.collect.aggregating import FAILED_ATTEMPTS, FailedAttempts, by_agent
from palestra.gym.collect.files import read_lines, write_whole
from palestra.gym.collect.pairing import paired
from palestra.gym.metrics import aggregate, pass_metrics
from palestra.gym.metrics.aggregate import with_expected
from palestra.types.gym import AGENT_REF, TASK_INDEX
from palestra.util.json_types import JsonObject


class RewardProfile(Struct, frozen=True):
    tasks: list[JsonObject]
    """For each task: statistics of every number, the number of rollouts, the row, and what failed."""
    agents: list[JsonObject]


def profile(inputs: Path, rollouts: Path, *, partial: bool = False) -> RewardProfile:
    """Computes a profile. Raises CollectError."""
    pairs = paired(inputs, rollouts, partial=partial)
    expected = Counter(row[TASK_INDEX] for row in read_lines(inputs))
    samples = {pair.row[TASK_INDEX]: pair.row for pair in reversed(pairs)}
    figures = aggregate([pair.result for pair in pairs])
    failed = FailedAttempts([rollouts])
    agents = by_agent(pair.result for pair in pairs)
    tasks = with_expected(figures["group_level_metrics"], expected, samples)
    return RewardProfile(
        [{**one, FAILED_ATTEMPTS: dict(failed.by_task[one[TASK_INDEX]])} for one in tasks],
        [
            {**_of_agent(name, agents.get(name, [])), FAILED_ATTEMPTS: dict(failed.by_agent[name])}
            for name in {**agents, **failed.by_agent}
        ],
    )


def save(made: RewardProfile, rollouts: Path) -> tuple[Path, Path]:
    """Saves both files beside the rollouts."""
    tasks = rollouts.with_name(f"{rollouts.stem}_reward_profiling.jsonl")
    agents = rollouts.with_name(f"{rollouts.stem}_agent_metrics.json")
    write_whole(tasks, b"".join(orjson.dumps(one, option=orjson.OPT_NON_STR_KEYS) + b"\n" for one in made.tasks))
    write_whole(agents, orjson.dumps(made.agents, option=orjson.OPT_INDENT_2))
    return tasks, agents


def _of_agent(name: str, results: list[Any]) -> JsonObject:
    figures = aggregate(results, lambda tasks: pass_metrics([[*task] for task in tasks if _has_rewards(task)]))
    return {**figures["agent_metrics"], AGENT_REF: {"name": name}}


def _has_rewards(task: list[Any]) -> bool:
    return all(isinstance(one.get("reward"), int | float) for one in task)
