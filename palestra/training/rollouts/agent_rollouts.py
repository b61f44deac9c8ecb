"""What is particular to rollouts that an agent plays: its player, bounds of its model calls, what is trained of it.

Owns: building these from the config. Never touches: playing, episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from palestra.agents import AgentPlayer
from palestra.coding import read_tasks
from palestra.config.train import GrpoConfig
from palestra.environments.coding import task_folders
from palestra.episodes import AsyncEpisodeClient, SamplingBounds
from palestra.sandbox import SandboxError
from palestra.training.rollouts.sync_collector import TrainingError
from palestra.types.episodes import OutOfBounds

RECORDS = "agent"
"""The folder in a run's folder where records of episodes are kept."""
SIDE = "side"


def agent_player(config: GrpoConfig, client: AsyncEpisodeClient, run: Path) -> AgentPlayer:
    """Raises TrainingError if the agent cannot play here."""
    tasks = [task for entry in config.environments for folder in task_folders(entry) for task in read_tasks(folder)]
    try:
        return AgentPlayer(config.agent, {task.id: task for task in tasks}, run / RECORDS, client)
    except (SandboxError, LookupError) as error:
        raise TrainingError(f"the agent cannot play here: {error}") from error


def agent_sampling(config: GrpoConfig) -> SamplingBounds:
    """An agent chooses its own temperature and filters; the run's hold instead, for evaluations too."""
    rollout = config.rollout
    return SamplingBounds(
        min_temperature=rollout.temperature,
        max_temperature=rollout.temperature,
        min_top_p=rollout.top_p,
        can_filter=False,
        max_tokens=rollout.max_tokens,
        outside=OutOfBounds.CLAMP,
    )


def trained_branches(config: GrpoConfig) -> Callable[[str], bool] | None:
    """Returns which conversations beside the main one are trained, by their agents; None: all."""
    if config.rollouts != "agent":
        return None
    chosen = config.agent.train_on

    def is_trained(agent: str) -> bool:
        kind = "continuations" if not agent else SIDE if agent == SIDE else "subagents"
        return kind in chosen

    return is_trained
