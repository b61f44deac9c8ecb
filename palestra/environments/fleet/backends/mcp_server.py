"""Any MCP server, with a verifier of one's own.

    mcp: {url: "http://127.0.0.1:9000/mcp", verifier: my_checks:tickets}
    mcp: {command: [python, my_server.py], verifier: my_checks:tickets}

`{task_key}`, `{env_key}` and `{data_key}` in a URL or command are filled in.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from palestra.environments.fleet.backend import FleetAttempt, FleetGrade, ToolAnswer
from palestra.environments.fleet.mcp_client import McpAddress, McpConnection
from palestra.environments.fleet.records import FleetTask
from palestra.environments.fleet.settings import FleetSettings
from palestra.environments.guarded_calls import error_text
from palestra.environments.platform.verifiers import score_of
from palestra.types.openai import ChatTool
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonPayload

CompletedCall: TypeAlias = tuple[str, JsonPayload, ToolAnswer]
"""Tool, arguments and result."""


class FinishedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of a verifier, which returns a number from 0 to 1, or None if it cannot tell. If one of its
    assertions fails, the score is 0. It may be a coroutine."""

    task: FleetTask
    answer: str | None
    conversation: Sequence[Message]
    calls: Sequence[CompletedCall]
    """All calls of the episode."""
    call_tool: Callable[[str, JsonPayload], Awaitable[ToolAnswer]]
    """Calls a tool, to look at the server's state."""


class McpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str | None = None
    command: list[str] = []
    headers: dict[str, str] = {}
    env: dict[str, str] = {}
    verifier: str | None = None
    """`package.module:function`."""


class McpBackend:
    def __init__(self, task: FleetTask, settings: FleetSettings) -> None:
        self._task, self._timeout_s = task, settings.verifier_timeout_s
        try:
            given = msgspec.convert(settings.mcp, McpSettings)
        except msgspec.ValidationError as e:
            raise ValueError(f"env_config.mcp: {e}") from None
        if bool(given.url) == bool(given.command):
            raise ValueError("env_config.mcp needs either a url or a command")
        self._verifier = _loaded(given.verifier)
        address = McpAddress(
            url=None if given.url is None else self._filled(given.url),
            command=tuple(map(self._filled, given.command)),
            headers=given.headers,
            env=given.env,
        )
        self._connection = McpConnection(address, settings.request_timeout_s)
        self._calls: list[CompletedCall] = []

    async def create(self) -> None:
        await self._connection.open()

    async def list_tools(self) -> list[ChatTool]:
        return await self._connection.list_tools()

    async def call_tool(self, name: str, arguments: JsonPayload) -> ToolAnswer:
        answer = await self._connection.call_tool(name, arguments)
        self._calls.append((name, arguments, answer))
        return answer

    async def verify(self, attempt: FleetAttempt) -> FleetGrade:
        finished = FinishedEpisode(
            task=self._task,
            answer=attempt.answer,
            conversation=attempt.conversation,
            calls=self._calls,
            call_tool=self._connection.call_tool,
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                if inspect.iscoroutinefunction(self._verifier):
                    returned = await self._verifier(finished)
                else:
                    returned = await asyncio.to_thread(self._verifier, finished)
        except AssertionError as e:
            return FleetGrade(score=0.0, error=error_text(e))
        try:
            return FleetGrade(score=score_of(returned))
        except ValueError as e:
            return FleetGrade(score=None, error=str(e))

    async def close(self) -> None:
        await self._connection.close()

    def _filled(self, text: str) -> str:
        task = self._task
        for name, value in (("task_key", task.task_key), ("env_key", task.env_key), ("data_key", task.data_key or "")):
            text = text.replace(f"{{{name}}}", value)
        return text


def _loaded(path: str | None) -> Callable[[FinishedEpisode], Any]:
    module, _, name = (path or "").partition(":")
    if not name:
        raise ValueError(
            "env_config.mcp.verifier must name the function that grades an episode: package.module:function"
        )
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"env_config.mcp.verifier {path!r}: {e}") from None
