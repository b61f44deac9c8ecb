"""The setup of rollouts that an agent plays: its player, bounds of its model calls, what is trained of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from palestra.agents import AgentPlayer
from palestra.agents.player import installation_of
from palestra.coding import CodingTask, read_tasks
from palestra.config.agents import AgentConfig
from palestra.config.environment_entries import EnvironmentEntry
from palestra.config.train import GrpoConfig
from palestra.environments.coding import task_folders
from palestra.episodes import AsyncEpisodeClient, SamplingBounds
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.sources import RolloutSourceError
from palestra.sandbox import SandboxError
from palestra.types.episodes import OutOfBounds
from palestra.types.rollouts import CODING

RECORDS = "agent"
"""The folder in a run's folder where records of episodes are kept."""
SIDE = "side"


def agent_player(
    agent: AgentConfig, entries: Sequence[EnvironmentEntry], client: AsyncEpisodeClient, records: Path
) -> AgentPlayer:
    """Returns a player of the coding tasks of these entries. Raises RolloutSourceError if the agent cannot play
    here."""
    with _agent_errors():
        return AgentPlayer(agent, {task.id: task for task in _tasks(entries)}, records, client)


def check_agent(agent: AgentConfig, entries: Sequence[EnvironmentEntry]) -> None:
    """Raises RolloutSourceError if the agent can play nothing here, before anything is started."""
    if agent.concurrency:
        with _agent_errors():
            installation_of(agent, _tasks(entries))


def _tasks(entries: Sequence[EnvironmentEntry]) -> list[CodingTask]:
    coding = [entry for entry in entries if entry.name == CODING]
    return [task for entry in coding for folder in task_folders(entry) for task in read_tasks(folder)]


@contextmanager
def _agent_errors() -> Iterator[None]:
    try:
        yield
    except (SandboxError, LookupError) as error:
        raise RolloutSourceError(f"the agent cannot play here: {error}") from error


def agent_sampling(settings: RolloutSettings) -> SamplingBounds:
    """An agent chooses its own temperature and filters; the run's hold instead, for evaluations too."""
    return SamplingBounds(
        min_temperature=settings.temperature,
        max_temperature=settings.temperature,
        min_top_p=settings.top_p,
        can_filter=False,
        max_tokens=settings.max_tokens,
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
