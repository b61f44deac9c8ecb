"""Plays episodes of environments that call the model themselves, such as gyms: the model is a policy of a probe."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from palestra.audit.episodes import ProbeEpisode, Trouble, text_of
from palestra.audit.policies import ProbePolicy
from palestra.audit.scripted_model import MODEL, ScriptedModel, scripted_model
from palestra.audit.settings import AuditSettings
from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments.environment_set import EnvironmentSet
from palestra.evaluation.players import open_players
from palestra.net.chat_apis import ModelEndpoint, OpenAIChat
from palestra.rollouts.endpoint.player import EndpointPlayer
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.types.rollouts import GroupRequest, Rollout, RolloutStop, Task


class ServedPlayer:
    knows_memory = False

    def __init__(self, player: EndpointPlayer, model: ScriptedModel, settings: AuditSettings) -> None:
        self._player, self._model = player, model
        self._seed, self._at_once = settings.seed, settings.at_once
        self._count = 0

    @property
    def has_tools(self) -> bool:
        return self._model.has_tools

    async def play(self, task: Task, policy: ProbePolicy, repeat: int = 0) -> ProbeEpisode:
        """Plays one episode, and no other at the same time."""
        self._model.take(policy, [task])
        return await self._played(task, policy, repeat)

    async def play_together(self, tasks: Sequence[Task], policy: ProbePolicy) -> list[ProbeEpisode]:
        """Plays episodes at the same time, of tasks that can be told apart by their prompts."""
        apart = list({text_of(task.prompt[-1]): task for task in tasks}.values())
        self._model.take(policy, apart)
        chosen = [apart[number % len(apart)] for number in range(self._at_once)]
        return list(await asyncio.gather(*(self._played(task, policy, number) for number, task in enumerate(chosen))))

    async def _played(self, task: Task, policy: ProbePolicy, repeat: int) -> ProbeEpisode:
        self._count += 1
        request = GroupRequest(id=f"audit-{self._count}", task=task, step=0, seeds=(self._seed,))
        return _episode(task, policy, repeat, await self._player.play(request, 0))


@asynccontextmanager
async def open_served_player(
    entry: EnvironmentEntry,
    environments: EnvironmentSet,
    settings: AuditSettings,
    folder: Path,
) -> AsyncIterator[ServedPlayer]:
    """Starts what plays the environment, with a model that says what policies say. `folder` gets its logs. Raises
    PolicyError and RolloutSourceError if it cannot be started."""
    limits = RolloutSettings(
        max_tokens=1_000_000, max_context=10_000_000, timeout_s=settings.timeout_s, concurrency=settings.at_once
    )
    async with scripted_model(settings.seed) as model:
        endpoint = ModelEndpoint(base_url=model.url, model=MODEL, api_key="audit", api=OpenAIChat())
        async with open_players([entry], None, endpoint, limits, folder, lambda _: None) as players:
            player = EndpointPlayer(endpoint, environments, limits, settings.timeout_s, players)
            yield ServedPlayer(player, model, settings)


def _episode(task: Task, policy: ProbePolicy, repeat: int, rollout: Rollout) -> ProbeEpisode:
    trouble = None
    if rollout.stop is RolloutStop.TIMEOUT:
        trouble = Trouble.HUNG
    elif rollout.has_failed:
        trouble = Trouble.RAISED
    return ProbeEpisode(
        task=task.id,
        probe=policy.name,
        repeat=repeat,
        messages=rollout.messages,
        first=len(task.prompt),
        reward=rollout.reward,
        steps=[rollout.reward],
        is_done=trouble is None,
        trouble=trouble,
        error=rollout.error or "",
        step_s=[turn.env_s for turn in rollout.turns] or [rollout.seconds],
        verdict=rollout.verdict,
    )
