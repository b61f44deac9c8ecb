"""Plays rollouts of a training run with the servers of a gym."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from msgspec import Struct

from palestra.chat import ChatTokenizer
from palestra.config.train import GrpoConfig
from palestra.environments.gym.errors import RowFailed
from palestra.net.http_client import HttpClient
from palestra.rollouts.gym.results import fill
from palestra.rollouts.gym.rows import GymRows
from palestra.rollouts.gym.servers import PolicyAddress, open_gyms
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.sources import PlayedRun, blank_rollout
from palestra.types.gym_failures import FailureClass, RowFailure
from palestra.types.rollouts import GroupRequest, Rollout
from palestra.util.json_types import JsonMapping


class GymPlayer(Struct, frozen=True):
    """Plays the rows of one entry of the config."""

    rows: GymRows
    policy: PolicyAddress
    tokenizer: ChatTokenizer

    async def play(
        self, request: GroupRequest, index: int, sampler: PolicySampler, settings: RolloutSettings
    ) -> Rollout:
        """Plays a rollout. Always returns a record, whatever happens to the servers."""
        rollout = blank_rollout(request, index, request.seeds[index])
        rollout.temperature = settings.temperature

        def take(result: JsonMapping) -> None:
            self._check_weights(result, sampler)
            fill(rollout, result, self.tokenizer, sampler.version)

        await self.rows.play(request, rollout, sampler.model, settings, take)
        return rollout

    def _check_weights(self, result: JsonMapping, sampler: PolicySampler) -> None:
        """Checks that the run's own weights have answered. To learn from another model's answer would be wrong, and
        nothing else would reveal it."""
        response = result.get("response")
        model = response.get("model") if isinstance(response, Mapping) else None
        if isinstance(model, str) and model not in (sampler.model, self.policy.alias):
            said = f"policy_model_name={self.policy.alias} policy_base_url={self.policy.api}"
            alias_text = said if self.policy.alias else "an alias of this run's (alias=NAME in its config)"
            reason = f"model {model!r} has answered instead of this run's weights; start the gym with {alias_text}"
            raise RowFailed(RowFailure.of(FailureClass.BAD_ANSWER, reason))


@asynccontextmanager
async def open_gym_players(config: GrpoConfig, session: PlayedRun) -> AsyncIterator[dict[str, GymPlayer]]:
    """Opens players by the name of their entry; there are none if a run has no gym."""
    policy = PolicyAddress(session.url, config.alias, config.model.name)
    logs, note = session.run.path / "logs", session.listener.note
    async with HttpClient() as client, open_gyms(config.environments, policy, logs, client, note) as gyms:
        yield {
            entry.name: GymPlayer(GymRows.of(entry, client, gyms[entry.name]), policy, session.tokenizer)
            for entry in config.environments
            if entry.name in gyms
        }
