"""The simple agent: a model calls tools until it answers without one, exactly as in NeMo Gym."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson

from palestra.gym.servers.agents import Reply, Rollout, WorldAgentServer, WorldAgentSettings
from palestra.gym.servers.resources import RESERVED
from palestra.gym.servers.responses import (
    added_usage,
    checked_response,
    function_calls,
    has_message,
    input_items,
    tool_output,
)
from palestra.gym.servers.settings import ServerReference
from palestra.gym.wire import Cookies
from palestra.types.openai import ModelResponse, ResponseItem, ResponsesParams

CallModel = Callable[[ResponsesParams], Awaitable[ModelResponse]]
"""Takes a whole request to the model; returns its checked Responses object."""
UseTool = Callable[[str, Any], Awaitable[str]]
"""Takes a tool's name and arguments; returns what the model reads."""

TurnTimes = list[tuple[float, float]]

NO_SUCH_TOOL = '{"detail":"Not Found"}'


async def play(
    params: ResponsesParams,
    ask: CallModel,
    use_tool: UseTool,
    *,
    max_steps: int | None,
    calls_of: Callable[[list[ResponseItem]], list[ResponseItem]] = function_calls,
    times: TurnTimes | None = None,
) -> ModelResponse:
    """Returns the last answer of the model, with the items of all turns and the sum of their usage. `times` gets the
    seconds of each call, and of the tools after it."""
    first = input_items(params)
    produced: list[ResponseItem] = []
    usage, step = None, 0
    while True:
        step += 1
        # servers of one process may answer without ever waiting; this lets time limits take effect
        await asyncio.sleep(0)
        began_s = time.perf_counter()
        response = await ask({**params, "input": [*first, *produced]})
        answered_s = time.perf_counter()
        output: list[ResponseItem] = response["output"]
        produced += output
        usage = added_usage(usage, response.get("usage"))
        calls = calls_of(output)
        is_over = response.get("incomplete_details") or (not calls and has_message(output))
        for call in () if is_over else calls:
            produced.append(tool_output(call.get("call_id"), await _used(call, use_tool)))
        if times is not None:
            times.append((answered_s - began_s, time.perf_counter() - answered_s))
        if is_over or (max_steps and step >= max_steps):
            break
    return {**response, "output": produced, "usage": usage}


async def _used(call: ResponseItem, use_tool: UseTool) -> str:
    try:
        arguments = orjson.loads(call.get("arguments", ""))
    except orjson.JSONDecodeError as error:
        return orjson.dumps({"error": f"Invalid tool call arguments: {error!r}"}).decode()
    name = call.get("name")
    if not isinstance(name, str) or not is_tool_name(name):
        return NO_SUCH_TOOL
    return await use_tool(name, arguments)


def is_tool_name(name: str) -> bool:
    """Whether a model may call it: routes of the server are no tools, nor is a path that leads to one, because a model
    must not verify itself."""
    return (
        name not in RESERVED
        and name.isprintable()
        and not any(c in name for c in "/?#%\\ ")
        and name not in ("", ".", "..")
    )


class SimpleAgentSettings(WorldAgentSettings, frozen=True, kw_only=True):
    """Settings of `simple_agent`."""

    model_server: ServerReference
    """The model server to ask: `{type: responses_api_models, name: NAME}`."""
    max_steps: int | None = None
    """Maximum number of model calls of a rollout. None: no limit."""


S = TypeVar("S", bound=SimpleAgentSettings)


class SimpleAgent(WorldAgentServer[S]):
    """Derive from `SimpleAgent[MySettings]` for further settings."""

    plain_settings = SimpleAgentSettings

    async def respond(self, params: ResponsesParams, rollout: Rollout) -> Reply:
        table = _Conversation(self, rollout)
        times: TurnTimes = []
        steps = self.settings.max_steps
        response = await play(params, table.call_model, table.use_tool, max_steps=steps, times=times)
        cookies = {**table.resources_cookies, **table.model_cookies}
        return Reply(response=response, cookies=cookies, turn_times=times)


class _Conversation:
    """The cookies of one rollout: each server gets back what it set last."""

    __slots__ = ("_agent", "_path", "_settings", "model_cookies", "resources_cookies")

    def __init__(self, agent: SimpleAgent[Any], rollout: Rollout) -> None:
        self._agent, self._settings = agent, agent.settings
        self._path = f"{rollout.prefix}/v1/responses"
        # Cookies of an earlier turn, if an agent has several: a session of the model server stays with its replica.
        self.model_cookies: Cookies = rollout.cookies
        self.resources_cookies: Cookies = rollout.cookies

    async def call_model(self, body: ResponsesParams) -> ModelResponse:
        name = self._settings.model_server.name
        timeout_s = self._settings.model_timeout_s
        answer = await self._agent.asked(name, self._path, body, self.model_cookies, timeout_s)
        self.model_cookies = answer.cookies
        return checked_response(answer.value(), name)

    async def use_tool(self, name: str, arguments: object) -> str:
        """Returns the answer of a tool, whatever its status: the model reads errors, too."""
        resources = self._settings.resources_server.name
        answer = await self._agent.peers.post(resources, f"/{name}", arguments, cookies=self.resources_cookies)
        self.resources_cookies = answer.cookies
        return answer.raw().decode(errors="replace")
