"""Agent servers: they play a row and return the judged rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from msgspec import Struct, field

from palestra.gym.errors import BadCall, PeerFailed, RolloutTimeout
from palestra.gym.records import ROLLOUT_NAME, ServerInstance, ServerKind
from palestra.gym.servers.base import GymServer, Peers, RouteSchemas, aggregated
from palestra.gym.servers.responses import checked_params, checked_verdict, filled_row
from palestra.gym.servers.settings import ServerReference, settings_of, settings_type
from palestra.gym.wire import NO_COOKIES, Cookies, GymRequest, GymResponse
from palestra.types.gym import ATTEMPT_INDEX, PARAMS, ROLLOUT_ID, ROLLOUT_INDEX, TASK_INDEX, TURN_TIMES
from palestra.types.openai import ModelResponse, ResponsesParams
from palestra.util.json_types import JsonMapping, JsonObject

ROLLOUT_S, MODEL_S = 3600.0, 1800.0


class AgentSettings(Struct, frozen=True, kw_only=True):
    """Settings of every agent server."""

    skip_verification: bool = False
    """Do not call the verifier; rollouts get `skip_verification_reward`."""
    skip_verification_reward: float = 0.0
    """The reward of rollouts that are not verified."""
    rollout_timeout_s: float = ROLLOUT_S
    """Time limit of one `/run`: seed, all turns, verdict."""
    model_timeout_s: float = MODEL_S
    """Time limit of one answer of the model."""
    token_id_capture: bool = False
    """Let the model server capture the token ids of this agent's calls, if the gym's `token_id_capture` is enabled."""


class WorldAgentSettings(AgentSettings, frozen=True, kw_only=True):
    """Settings of agents that play in the world of a resources server."""

    resources_server: ServerReference
    """The resources server to play in: `{type: resources_servers, name: NAME}`."""


TurnTimes: TypeAlias = list[tuple[float, float]]
"""Seconds of each model call, and of the tools after it."""


class Reply(Struct, frozen=True, kw_only=True):
    """An agent's answer, without a verdict."""

    response: ModelResponse
    cookies: dict[str, str] = field(default_factory=dict)
    """Cookies for the verifying call."""
    turn_times: TurnTimes = field(default_factory=list)
    """A pair for each model call: its seconds, and those of the tools after it."""


class Rollout(Struct, frozen=True, kw_only=True):
    """State of a rollout while it is played."""

    cookies: Cookies = NO_COOKIES
    prefix: str = ""
    """Prefix of the paths of its model calls, under which they are recorded."""


S = TypeVar("S", bound=AgentSettings)
W = TypeVar("W", bound=WorldAgentSettings)
T = TypeVar("T")


class AgentServer(GymServer, Generic[S]):
    """Base class of agent servers; write `AgentServer[MySettings]` for further settings."""

    kind = ServerKind.AGENT
    plain_settings: ClassVar[type[AgentSettings]] = AgentSettings

    def __init__(self, instance: ServerInstance, peers: Peers) -> None:
        super().__init__(instance, peers)
        self.settings: S = settings_of(instance, settings_type(type(self), self.plain_settings))

    # To override in an agent

    async def run(self, row: JsonObject, rollout: Rollout) -> JsonObject:
        """Plays a row and returns it with its verdict. Its `responses_create_params` are already checked."""
        raise NotImplementedError(f"{type(self).__name__} has no run")

    async def respond(self, params: ResponsesParams, rollout: Rollout) -> Reply:
        """Plays without seed and verdict."""
        raise NotImplementedError(f"{type(self).__name__} has no responses")

    async def aggregate(self, call: GymRequest) -> GymResponse:
        return aggregated(call)

    # The rest

    async def answer(self, call: GymRequest) -> GymResponse:
        match call.path:
            case "/run":
                return GymResponse(body=await self._in_time(self._run(call)))
            case "/v1/responses":
                reply = await self._in_time(self._respond(call))
                return GymResponse(body=reply.response, cookies=dict(reply.cookies))
            case "/aggregate_metrics":
                return await self.aggregate(call)
        raise BadCall(404, "Not Found")

    def routes(self) -> RouteSchemas:
        return {path: {"type": "object"} for path in ("/run", "/v1/responses", "/aggregate_metrics")}

    async def asked(
        self, name: str, path: str, body: object, cookies: Cookies, timeout_s: float | None = None
    ) -> GymResponse:
        """Raises PeerFailed if it is not successful."""
        answer = await self.peers.post(name, path, body, cookies=cookies, timeout_s=timeout_s)
        if not answer.is_ok:
            raise PeerFailed(name, path, answer.status, answer.raw())
        return answer

    async def _run(self, call: GymRequest) -> JsonObject:
        row = call.body
        if not isinstance(row, dict):
            raise BadCall(422, [{"type": "dict_type", "loc": ["body"], "msg": "Input should be an object"}])
        checked_params(row.get(PARAMS), [PARAMS])
        captures = call.captures_tokens or self._captures_tokens()
        is_named = captures or self.peers.settings.get("observability_enabled")
        prefix = _prefix(call.rollout_id or (rollout_id_of(row) if is_named else None), captures)
        return await self.run(row, Rollout(cookies=call.cookies, prefix=prefix))

    async def _respond(self, call: GymRequest) -> Reply:
        params = checked_params(call.body, [])
        prefix = _prefix(call.rollout_id, call.captures_tokens)
        return await self.respond(params, Rollout(cookies=call.cookies, prefix=prefix))

    async def _in_time(self, work: Coroutine[Any, Any, T]) -> T:
        limit_s = self.settings.rollout_timeout_s
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await work
        except TimeoutError:
            if limit.expired():
                raise RolloutTimeout(f"the rollout took longer than rollout_timeout_s = {limit_s:g}") from None
            raise

    def _captures_tokens(self) -> bool:
        gym = self.peers.settings.get("token_id_capture")
        if not isinstance(gym, Mapping) or not gym.get("enabled"):
            return False
        return bool(gym.get("all_agents")) or self.settings.token_id_capture


class WorldAgentServer(AgentServer[W]):
    """An agent that plays in the world of a resources server."""

    plain_settings = WorldAgentSettings

    async def run(self, row: JsonObject, rollout: Rollout) -> JsonObject:
        """Seeds, plays and verifies a row. The model gets the parameters of the row unchanged."""
        whole = filled_row(row)
        seeded = await self.ask_resources("/seed_session", whole, rollout.cookies)
        reply = await self.respond(row[PARAMS], Rollout(cookies=seeded.cookies, prefix=rollout.prefix))
        played = {**whole, "response": reply.response}
        if self.settings.skip_verification:
            reward = {"reward": self.settings.skip_verification_reward, "verification_skipped": True}
            return played | reward | _timed(reply)
        verdict = await self.ask_resources("/verify", played, reply.cookies)
        return checked_verdict(verdict.value(), self.settings.resources_server.name) | _timed(reply)

    async def aggregate(self, call: GymRequest) -> GymResponse:
        """Metrics over rollouts, computed by the resources server."""
        return await self.ask_resources("/aggregate_metrics", call.body, NO_COOKIES)

    async def ask_resources(self, path: str, body: object, cookies: Cookies) -> GymResponse:
        """Raises PeerFailed if it is not successful."""
        return await self.asked(self.settings.resources_server.name, path, body, cookies)


def _timed(reply: Reply) -> dict[str, TurnTimes]:
    return {TURN_TIMES: reply.turn_times} if reply.turn_times else {}


def rollout_id_of(row: JsonMapping) -> str | None:
    """Id of a rollout: the given one or `<task>-<rollout>`, with `-a<n>` for a further attempt."""
    given, task, rollout = row.get(ROLLOUT_ID), row.get(TASK_INDEX), row.get(ROLLOUT_INDEX)
    if given is None and (task is None or rollout is None):
        return None
    base = f"{task}-{rollout}" if given is None else str(given)
    attempt = row.get(ATTEMPT_INDEX)
    name = f"{base}-a{attempt}" if attempt else base
    if not ROLLOUT_NAME.fullmatch(name):
        message = f"{ROLLOUT_ID} has letters, digits, . _ - and begins with a letter or digit"
        where = ["body", ROLLOUT_ID]
        raise BadCall(422, [{"type": "string_pattern_mismatch", "loc": where, "msg": message, "input": name}])
    return name


def _prefix(rollout_id: str | None, captures_tokens: bool) -> str:
    if rollout_id is None:
        return ""
    return f"/ng-rollout/{rollout_id}/training-token-capture" if captures_tokens else f"/ng-rollout/{rollout_id}"
