"""Rollouts and groups made by hand, for tests of what is computed from them."""

from __future__ import annotations

from typing import Any

from palestra.config.train import GrpoConfig
from palestra.types import StopReason
from palestra.types.rollouts import Group, Rollout, RolloutStop, Task, Turn


def make_turn(tokens: int = 3, observation: int = 0, *, cut: bool = False, logprob: float = -0.5, **more: Any) -> Turn:
    return Turn(
        observation=list(range(900, 900 + observation)),
        tokens=list(range(10, 10 + tokens)),
        logprobs=[logprob] * tokens,
        stop=StopReason.LENGTH if cut else StopReason.STOP,
        version=more.pop("version", 0),
        **more,
    )


def make_rollout(
    name: str = "g-0", reward: float | None = 1.0, turns: list[Turn] | None = None, **more: Any
) -> Rollout:
    turns = [make_turn()] if turns is None else turns
    return Rollout(
        id=name,
        group=more.pop("group", name.rpartition("-")[0]),
        index=more.pop("index", int(name.rpartition("-")[2])),
        task=more.pop("task", "t"),
        environment=more.pop("environment", "math"),
        seed=0,
        stop=more.pop("stop", RolloutStop.DONE),
        prompt=more.pop("prompt", [1, 2]),
        turns=turns,
        reward=reward,
        **more,
    )


def make_group(name: str, rewards: list[float | None], *, step: int = 0, **more: Any) -> Group:
    """A rollout for each reward; None is one that failed."""
    rollouts = [
        make_rollout(f"{name}-{i}", reward, stop=RolloutStop.ENV_FAILED if reward is None else RolloutStop.DONE, **more)
        for i, reward in enumerate(rewards)
    ]
    return group_of(name, rollouts, step=step)


def group_of(name: str, rollouts: list[Rollout], *, step: int = 0) -> Group:
    return Group(id=name, task=Task(id="t", environment="math", prompt=[]), step=step, rollouts=rollouts)


def make_config(**sections: Any) -> GrpoConfig:
    return GrpoConfig.model_validate({"environments": [{"name": "math"}], **sections})
