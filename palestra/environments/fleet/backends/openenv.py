"""Any OpenEnv server whose environment has tools, over its WebSocket: one connection is one episode.

    openenv: {url: "http://127.0.0.1:8000", reset: {task_key: "{task_key}"}, finish: {type: finish, answer: "{answer}"}}

`finish` is the action that ends an episode there; without it the reward of the last step counts. `{task_key}`,
`{data_key}` and `{answer}` are filled in; a field whose answer is missing is left out.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

from palestra.environments.fleet.backend import FleetAttempt, FleetGrade, ToolAnswer
from palestra.environments.fleet.errors import BackendError
from palestra.environments.fleet.mcp_client import answer_of
from palestra.environments.fleet.records import FleetTask
from palestra.environments.fleet.settings import FleetSettings
from palestra.environments.fleet.tool_schemas import openai_tool
from palestra.environments.guarded_calls import error_text
from palestra.types.openai import ChatTool
from palestra.util.json_types import JsonObject, JsonPayload

MAX_FRAME = 100 * 1024 * 1024  # as in OpenEnv's own client
MISTAKES = {"VALIDATION_ERROR", "EXECUTION_ERROR"}
"""Errors about the action; after any other the episode is over."""


class OpenEnvSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str
    reset: JsonObject = {}
    finish: JsonObject | None = None
    headers: dict[str, str] = {}


class OpenEnvBackend:
    def __init__(self, task: FleetTask, settings: FleetSettings) -> None:
        try:
            self._given = msgspec.convert(settings.openenv, OpenEnvSettings)
        except msgspec.ValidationError as e:
            raise ValueError(f"env_config.openenv: {e}") from None
        self._task, self._timeout_s = task, settings.request_timeout_s
        self._socket: Any = None
        self._is_waiting = False
        self._reward: Any = None
        self._is_done = False
        """Whether the server ended the episode itself: then its reward counts."""

    async def create(self) -> None:
        try:
            from websockets.asyncio.client import connect
        except ModuleNotFoundError:
            raise BackendError("OpenEnv servers need websockets; to install: pip install websockets") from None
        address = f"{self._given.url.rstrip('/')}/ws".replace("http", "ws", 1)
        headers = self._given.headers
        try:
            self._socket = await connect(
                address, additional_headers=headers, max_size=MAX_FRAME, open_timeout=self._timeout_s, proxy=None
            )
        except Exception as e:  # boundary: errors of DNS, TLS, HTTP or WebSockets
            raise BackendError(f"no OpenEnv server at {self._given.url}: {error_text(e)}") from e
        response = await self._request("reset", self._filled(self._given.reset, None))
        if "error" in response:
            raise BackendError(f"the OpenEnv server could not reset: {response['error']}")

    async def list_tools(self) -> list[ChatTool]:
        response = await self._request("step", {"type": "list_tools"})
        tools = response.get("observation", {}).get("tools") or []
        return [openai_tool(t["name"], t.get("description"), t.get("input_schema")) for t in tools]

    async def call_tool(self, name: str, arguments: JsonPayload) -> ToolAnswer:
        response = await self._request("step", {"type": "call_tool", "tool_name": name, "arguments": arguments})
        if "error" in response:
            return ToolAnswer(None, str(response["error"]))
        self._reward, self._is_done = response.get("reward"), bool(response.get("done"))
        found = response["observation"]
        if found.get("error"):
            return ToolAnswer(None, str(found["error"].get("message") or found["error"]))
        return _tool_answer(found.get("result"))

    async def verify(self, attempt: FleetAttempt) -> FleetGrade:
        if self._given.finish is not None and not self._is_done:
            response = await self._request("step", self._filled(self._given.finish, attempt.answer))
            if "error" in response:
                return FleetGrade(score=None, error=str(response["error"]))
            self._reward = response.get("reward")
        reward = self._reward
        if not isinstance(reward, bool | int | float) or not math.isfinite(reward):
            return FleetGrade(score=None, error=f"the server returned {reward!r} as the reward, which is not a number")
        return FleetGrade(score=float(reward))

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()  # the server ends the episode with the connection

    def _filled(self, action: JsonObject, answer: str | None) -> JsonObject:
        known = {"{task_key}": self._task.task_key, "{data_key}": self._task.data_key, "{answer}": answer}
        filled = {key: known.get(value, value) if isinstance(value, str) else value for key, value in action.items()}
        return {key: value for key, value in filled.items() if value is not None or action[key] is None}

    async def _request(self, kind: str, data: JsonPayload) -> JsonObject:
        """Returns the answer; `{"error": text}` if the server refused the action."""
        if self._socket is None or self._is_waiting:
            raise BackendError("the connection to the OpenEnv server is closed, or an earlier answer was not read")
        self._is_waiting = True  # it stays set if cancelled: answers have no number to tell them apart
        try:
            await self._socket.send(json.dumps({"type": kind, "data": data}))
            frame: Any = json.loads(await self._socket.recv())
        except Exception as e:  # boundary: errors of the socket, or invalid JSON
            raise BackendError(
                f"the connection to the OpenEnv server at {self._given.url} is lost: {error_text(e)}"
            ) from e
        self._is_waiting = False
        response = frame.get("data") or {}
        if frame.get("type") != "error":
            return response
        if response.get("code") not in MISTAKES:
            raise BackendError(
                f"the OpenEnv server ended the episode: {response.get('code')}: {response.get('message')}"
            )
        return {"error": response.get("message") or response["code"]}


def _tool_answer(result: object) -> ToolAnswer:
    """Converts plain data, or a result of MCP's, in either spelling."""
    if not isinstance(result, dict) or not isinstance(result.get("content"), list):
        return ToolAnswer(result)
    is_error = result.get("isError") or result.get("is_error")
    structured = result.get("structuredContent") or result.get("structured_content")
    return answer_of({"content": result["content"], "isError": is_error, "structuredContent": structured})
