"""Running servers as environments to audit: MCP servers, whose tools are tried, and OpenEnv servers, whose actions
are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from palestra.chat.tool_calls import ParsedCall, ParseFailure, parse_tool_call
from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments.fleet.backends.openenv import MAX_FRAME
from palestra.environments.fleet.tool_schemas import openai_tool
from palestra.environments.platform.tool_schemas import ArgumentsSchema
from palestra.environments.text import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from palestra.types.rollouts import Task
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload

SCHEMA_S = 10.0
ACTION = "act"
"""The name under which policies call an action."""
TOOL_NAME = "tool_name"
"""The field by which actions of an environment with tools are told."""
MAX_TURNS = 20
TASKS = 4  # seeds with which an OpenEnv server is reset
OWN_FIELDS = ("metadata",)
"""Fields of every action, which say nothing about it."""


class TargetUnreachable(ConnectionError):
    """There is no server at a URL."""


def server_entry(url: str, folder: Path) -> EnvironmentEntry:
    """Returns the entry of a server. `folder` gets a file with its one task, where it needs one. Raises
    TargetUnreachable."""
    schema = _openenv_schema(url)
    if schema is not None:
        config = {"url": url.rstrip("/"), "action": schema}
        return EnvironmentEntry(name="palestra.audit.server_urls:OpenEnvActions", config=config)
    file = folder / "tasks.json"
    file.write_text(json.dumps([{"key": "tools", "prompt": "Use the tools.", "env_id": "mcp", "max_turns": MAX_TURNS}]))
    config = {
        "tasks_file": str(file),
        "backend": "mcp",
        "mcp": {"url": url, "verifier": "palestra.audit.server_urls:no_verdict"},
    }
    return EnvironmentEntry(name="fleet_task", config=config)


def no_verdict(_episode: object) -> None:
    """The verifier of a server that has none."""


def _openenv_schema(url: str) -> JsonObject | None:
    """Returns the schema of an OpenEnv server's actions; None: it is no OpenEnv server."""
    try:
        answer = httpx.get(f"{url.rstrip('/')}/schema", timeout=SCHEMA_S)
    except httpx.HTTPError as error:
        raise TargetUnreachable(f"no server answers at {url}: {error}") from None
    try:
        schema = answer.json().get("action") if answer.is_success else None
    except (ValueError, AttributeError):
        return None
    return schema if isinstance(schema, dict) else None


class OpenEnvActions(BaseTextEnv):
    """An episode at an OpenEnv server. Its tools are called by their names; where it has none, an action is a call of
    `act`, and text is the action's one text, if it has one."""

    max_turns = MAX_TURNS

    def __init__(self, env_config: Any = None, extras: JsonMapping | None = None) -> None:
        super().__init__(env_config, extras)
        self._url = str(env_config["url"])
        self._schema = flat_schema(env_config["action"])
        self._has_tools = TOOL_NAME in self._schema["properties"]
        self.tools = [openai_tool(ACTION, None, self._schema)]
        self._socket: Any = None

    @staticmethod
    def tasks(split: str) -> list[Task]:
        """Returns tasks that differ in the seed with which the server is reset."""
        numbers = range(TASKS) if split == "train" else range(TASKS, 2 * TASKS)
        message = {"role": "user", "content": "Act."}
        return [
            Task(id=f"seed-{number}", environment="openenv", prompt=[message], extras={"seed": number})
            for number in numbers
        ]

    async def init_async(self, prompt: ConversationType) -> tuple[ConversationType, JsonObject]:
        from websockets.asyncio.client import connect

        address = f"{self._url}/ws".replace("http", "ws", 1)
        self._socket = await connect(address, max_size=MAX_FRAME, proxy=None)
        answer = await self._request("reset", {"seed": self.extras["seed"]})
        if self._has_tools:
            listed = (await self._request("step", {"type": "list_tools"})).get("observation") or {}
            tools = listed.get("tools") or []
            self.tools = [openai_tool(one["name"], one.get("description"), one.get("input_schema")) for one in tools]
        return [*prompt, _message(answer)], {}

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        """Sends an action. One that cannot be read, or that the server refuses, is answered with the reason."""
        self.turns += 1
        found = parse_tool_call(action)
        if isinstance(found, ParseFailure):
            return _output([{"role": "user", "content": found.reason}], 0.0, False)
        given = self._called(found) if isinstance(found, ParsedCall) else self._action_in_text(action)
        if given is None:
            return _output([{"role": "user", "content": "no action"}], 0.0, False)
        answer = await self._request("step", given)
        reward = answer.get("reward")
        return _output([_message(answer)], 0.0 if reward is None else reward, bool(answer.get("done")))

    async def close_async(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    def _called(self, call: ParsedCall) -> JsonPayload | None:
        if self._has_tools:
            return {"type": "call_tool", TOOL_NAME: call.name, "arguments": call.arguments}
        return call.arguments if call.name == ACTION else None

    def _action_in_text(self, text: str) -> JsonPayload | None:
        if self._has_tools:
            return None
        texts = [name for name, one in self._schema["properties"].items() if one.get("type") == "string"]
        return {texts[0]: text} if len(texts) == 1 and self._schema["required"] in ([], texts) else None

    async def _request(self, kind: str, data: JsonPayload) -> JsonObject:
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        frame = json.loads(await self._socket.recv())
        found = frame.get("data") or {}
        if frame.get("type") != "error":
            return found
        if found.get("code") == "VALIDATION_ERROR":
            return {"observation": {"error": found.get("message")}}
        raise RuntimeError(f"the server answers {kind} with {found.get('code')}: {found.get('message')}")


def flat_schema(schema: JsonMapping) -> ArgumentsSchema:
    """Returns the schema of an action without references and without the fields that all actions have."""
    definitions = schema.get("$defs") or {}
    properties = {
        name: _resolved(one, definitions)
        for name, one in (schema.get("properties") or {}).items()
        if name not in OWN_FIELDS
    }
    required = [name for name in schema.get("required") or [] if name in properties]
    return {"type": "object", "properties": properties, "required": required}


def _resolved(schema: Any, definitions: JsonMapping) -> Any:
    if isinstance(schema, dict) and "$ref" in schema:
        return definitions.get(str(schema["$ref"]).rpartition("/")[2], {})
    return schema


def _message(answer: JsonMapping) -> dict[str, str]:
    return {"role": "user", "content": json.dumps(answer.get("observation"), sort_keys=True, default=str)}


def _output(messages: ConversationType, reward: float, done: bool) -> BaseTextEnvStepOutput:
    return BaseTextEnvStepOutput(observations=messages, reward=reward, done=done, metadata={})
