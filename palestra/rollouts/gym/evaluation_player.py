"""Plays rollouts of an evaluation with the servers of a gym, which call the model themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct

from palestra.chat.responses_input import ChatDialect, ItemError, chat_messages
from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments.step_results import verdict_of
from palestra.net.chat_apis import ModelEndpoint
from palestra.net.http_client import HttpClient
from palestra.rollouts.gym.player import GymRows
from palestra.rollouts.gym.results import numbers, reward_of, verdict_fields
from palestra.rollouts.gym.servers import PolicyAddress, open_gyms
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.sources import set_turn_times
from palestra.types import StopReason
from palestra.types.gym import TURN_TIMES
from palestra.types.rollouts import PROMPT_TOKENS, SAMPLED_TOKENS, GroupRequest, Message, Rollout, RolloutStop, Turn
from palestra.util.json_types import JsonMapping


class GymEvaluationPlayer(Struct, frozen=True):
    """Plays the rows of one entry of the config."""

    rows: GymRows
    model: str
    settings: RolloutSettings

    async def play(self, request: GroupRequest, rollout: Rollout) -> Rollout:
        """Fills the record of a rollout, whatever happens to the servers."""
        await self.rows.play(request, rollout, self.model, self.settings, lambda result: _fill(rollout, result))
        return rollout


def _fill(rollout: Rollout, result: JsonMapping) -> None:
    """Raises NotTrainable if the answer has no reward."""
    response = result.get("response")
    response = response if isinstance(response, Mapping) else {}
    usage = response.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    rollout.metrics = numbers(result) | {
        PROMPT_TOKENS: float(usage.get("input_tokens") or 0),
        SAMPLED_TOKENS: float(usage.get("output_tokens") or 0),
    }
    rollout.verdict = verdict_of(verdict_fields(result))
    answered = _messages(response.get("output"))
    rollout.messages += answered
    is_cut = response.get("status") == "incomplete"
    texts = [str(one.get("content") or "") for one in answered if one["role"] == "assistant"]
    rollout.turns = [
        Turn(observation=[], tokens=[], logprobs=[], stop=StopReason.STOP, version=0, text=text) for text in texts
    ]
    set_turn_times(rollout, result.get(TURN_TIMES))
    if is_cut and rollout.turns:
        rollout.stop, rollout.turns[-1].stop = RolloutStop.LENGTH, StopReason.LENGTH
    rollout.reward = reward_of(result)


def _messages(output: object) -> Sequence[Message]:
    """Returns what was said, for people to read; items that cannot be shown as a chat are left out."""
    if not isinstance(output, list):
        return []
    try:
        return [one.message for one in chat_messages(output, None, ChatDialect.OURS, with_ids=False)]
    except ItemError:
        return []


@asynccontextmanager
async def open_gym_players(
    entries: Sequence[EnvironmentEntry],
    endpoint: ModelEndpoint,
    settings: RolloutSettings,
    logs: Path,
    note: Callable[[str], None],
) -> AsyncIterator[dict[str, GymEvaluationPlayer]]:
    """Opens players by the name of their entry. Raises PolicyError if a gym cannot be started, RolloutSourceError if
    one does not answer."""
    policy = PolicyAddress(endpoint.base_url, None, endpoint.model, endpoint.api_key)
    async with HttpClient() as client, open_gyms(entries, policy, logs, client, note) as gyms:
        yield {
            entry.name: GymEvaluationPlayer(GymRows.of(entry, client, gyms[entry.name]), endpoint.model, settings)
            for entry in entries
            if entry.name in gyms
        }
