"""Players of environments that are not played turn by turn in this process: gyms, agents in sandboxes, verifiers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from palestra.config.agents import AgentConfig
from palestra.config.environment_entries import EnvironmentEntry
from palestra.net.chat_apis import ModelEndpoint
from palestra.rollouts.agents.evaluation_player import open_agent_player
from palestra.rollouts.endpoint.player import RolloutPlayer
from palestra.rollouts.gym.evaluation_player import open_gym_players
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.verifiers.evaluation_player import open_verifiers_evaluation


@asynccontextmanager
async def open_players(
    entries: Sequence[EnvironmentEntry],
    agent: AgentConfig | None,
    endpoint: ModelEndpoint,
    settings: RolloutSettings,
    folder: Path,
    note: Callable[[str], None],
) -> AsyncIterator[dict[str, RolloutPlayer]]:
    """Opens players by the name of their entry. `folder` gets their logs. Raises PolicyError and RolloutSourceError if
    one cannot be started."""
    async with (
        open_gym_players(entries, endpoint, settings, folder / "logs", note) as gyms,
        open_agent_player(agent, entries, endpoint, settings, folder, note) as agents,
        open_verifiers_evaluation(entries, endpoint, settings, folder / "logs") as verifiers,
    ):
        yield {**gyms, **agents, **verifiers}
