"""The agent for worlds with reset and step: model and world take turns, and rewards are summed."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Annotated, Any, TypeVar
from uuid import uuid4

from msgspec import Meta, Struct

from palestra.gym.records import STEP_ID
from palestra.gym.servers.agents import Reply, Rollout, WorldAgentServer, WorldAgentSettings
from palestra.gym.servers.responses import (
    PARAM_DEFAULTS,
    added_usage,
    checked_object,
    checked_response,
    filled_row,
    input_items,
    tool_output,
    user_message,
)
from palestra.gym.servers.settings import ServerReference
from palestra.gym.wire import NO_COOKIES, Cookies
from palestra.types.gym import PARAMS, TURN_TIMES
from palestra.types.openai import ModelResponse, ResponseItem, ResponsesParams
from palestra.util.json_types import JsonObject

log = logging.getLogger(__name__)

CLOSE_S = 60.0


class GymnasiumAgentSettings(WorldAgentSettings, frozen=True, kw_only=True):
    """Settings of `gymnasium_agent`."""

    model_server: ServerReference
    """The model server to ask: `{type: responses_api_models, name: NAME}`."""
    max_steps: Annotated[int, Meta(ge=1)] = 10
    """Maximum number of steps of a rollout."""


class _World(Struct):
    """The world of one rollout, and the calls to it."""

    agent: GymnasiumAgent[Any]
    row: JsonObject
    cookies: Cookies
    can_close: bool = False
    can_repeat: bool = False

    async def reset(self) -> str | None:
        answer = await self.agent.ask_resources("/reset", self.row, self.cookies)
        self.cookies = answer.cookies
        answered = checked_object(answer.value(), self.agent.settings.resources_server.name)
        info = answered.get("info") or {}
        self.can_close = bool(info.get("supports_explicit_close"))
        self.can_repeat = bool(info.get("supports_step_idempotency"))
        return answered.get("observation")

    async def step(self, response: ModelResponse) -> JsonObject:
        body = {**self.row, "response": response}
        if self.can_repeat:
            body[STEP_ID] = uuid4().hex
        answer = await self.agent.ask_resources("/step", body, self.cookies)
        self.cookies = answer.cookies
        return checked_object(answer.value(), self.agent.settings.resources_server.name)

    async def close(self) -> None:
        """Closes the world; a failure does not affect the rollout."""
        if not self.can_close:
            return
        name = self.agent.settings.resources_server.name
        try:
            await self.agent.asked(name, "/close", self.row, self.cookies, CLOSE_S)
        except Exception as error:  # boundary: the rollout is already played
            log.warning("%s could not be closed: %s", name, error)


S = TypeVar("S", bound=GymnasiumAgentSettings)


class GymnasiumAgent(WorldAgentServer[S]):
    """Derive from `GymnasiumAgent[MySettings]` for further settings."""

    plain_settings = GymnasiumAgentSettings

    async def run(self, row: JsonObject, rollout: Rollout) -> JsonObject:
        world = _World(self, filled_row(row), rollout.cookies)
        observation = await world.reset()
        try:
            return await self._play(world, row[PARAMS], observation, rollout.prefix)
        finally:
            await world.close()

    async def respond(self, params: ResponsesParams, rollout: Rollout) -> Reply:
        """Plays one turn of the model: without a world there are no steps."""
        return await self._ask(params, rollout.cookies, rollout.prefix)

    async def _play(self, world: _World, given: ResponsesParams, observation: str | None, prefix: str) -> JsonObject:
        first = [*input_items(given), *([user_message(observation)] if observation else [])]
        params: ResponsesParams = {**given, "input": first}
        produced: list[ResponseItem] = []
        reward, usage, cookies = 0.0, None, NO_COOKIES
        step: JsonObject = {}
        times: list[tuple[float, float]] = []
        reply = Reply(response={"output": []})
        for _ in range(self.settings.max_steps):
            await asyncio.sleep(0)  # as in `simple.play`
            began_s = time.perf_counter()
            reply = await self._ask({**params, "input": [*first, *produced]}, cookies, prefix)
            answered_s = time.perf_counter()
            cookies = reply.cookies
            produced += reply.response["output"]
            usage = added_usage(usage, reply.response.get("usage"))
            step = await world.step(reply.response)
            times.append((answered_s - began_s, time.perf_counter() - answered_s))
            reward += step.get("reward", 0.0)
            if step.get("terminated") or step.get("truncated"):
                break
            produced += _seen(step)
        else:
            step = {**step, "truncated": True}
        return {
            PARAMS: {**PARAM_DEFAULTS, **params},
            "response": {**reply.response, "output": produced, "usage": usage},
            "reward": reward,
            "terminated": bool(step.get("terminated")),
            "truncated": bool(step.get("truncated")),
            "info": step.get("info") or {},
            TURN_TIMES: times,
        }

    async def _ask(self, body: ResponsesParams, cookies: Cookies, prefix: str) -> Reply:
        name = self.settings.model_server.name
        answer = await self.asked(name, f"{prefix}/v1/responses", body, cookies, self.settings.model_timeout_s)
        return Reply(response=checked_response(answer.value(), name), cookies=dict(answer.cookies))


def _seen(step: JsonObject) -> list[ResponseItem]:
    """Returns what the world says to the model."""
    outputs = (step.get("info") or {}).get("tool_outputs") or []
    items = [tool_output(one["call_id"], one["output"]) for one in outputs]
    return [*items, user_message(step["observation"])] if step.get("observation") else items
