"""Hosted Fleet, or any server with its REST API, through the unmodified `fleet-python`."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Any, TypedDict

from palestra.environments.fleet.backend import FleetAttempt, FleetGrade, ToolAnswer
from palestra.environments.fleet.errors import BackendError
from palestra.environments.fleet.mcp_client import McpAddress, McpConnection
from palestra.environments.fleet.records import FleetTask
from palestra.environments.fleet.settings import FleetSettings
from palestra.environments.fleet.tool_schemas import name_of
from palestra.environments.guarded_calls import error_text
from palestra.environments.platform.verifiers import VerifierExecution, score_of
from palestra.types.openai import ChatTool
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonPayload

log = logging.getLogger(__name__)

ENDPOINTS = ("mcp", "api/v1/mcp")
"""Paths below an instance's root. Some images have one, some both; the first that has a tool owns it."""
COMPUTER, BROWSER = "computer_use", "browser_use"
COMPUTER_TOOL = "computer"
MAKE_DELAYS_S = (2, 4, 8, 16)
PASSING = ("health check", "timeout", "connection", "temporarily", '"retryable": true', "rate limit", "in-flight")
"""Words in errors that may not occur at another try."""
VERIFY_DELAYS_S = (3, 6, 12)
RESET_S = 10
TAKES_CONVERSATION = re.compile(r"\A[^(]*?^def \w+\([^)]*\bconversation\b", re.DOTALL | re.MULTILINE)
"""In the parameters of the first function."""


class VerifierArguments(TypedDict, total=False):
    final_answer: str
    conversation: list[Message]


class HostedBackend:
    def __init__(self, task: FleetTask, settings: FleetSettings) -> None:
        self._task, self._settings = task, settings
        self._fleet: Any = None
        self._env: Any = None
        self._connections: list[McpConnection] = []
        self._owners: dict[str, McpConnection] = {}

    async def create(self) -> None:
        try:
            from fleet import AsyncFleet  # pyright: ignore[reportAttributeAccessIssue, reportMissingImports]
        except ModuleNotFoundError:
            raise BackendError("hosted Fleet needs its SDK; to install: pip install fleet-python") from None
        self._fleet = AsyncFleet(api_key=self._settings.api_key, base_url=self._settings.base_url)
        self._env = await self._made()
        try:
            async with asyncio.timeout(RESET_S):
                await self._env.reset()
        except Exception as e:  # boundary: the SDK's errors have no common class; the episode continues
            log.warning("instance %s was not reset: %s", self._env.instance_id, error_text(e))

    async def list_tools(self) -> list[ChatTool]:
        is_computer = self._task.task_modality == COMPUTER
        found: list[ChatTool] = []
        problems: list[str] = []
        for path in ENDPOINTS[1:] if is_computer else ENDPOINTS:
            connection = McpConnection(McpAddress(url=self._env.urls.root + path), self._settings.request_timeout_s)
            try:
                await connection.open()
                self._connections.append(connection)
                tools = await connection.list_tools()
            except Exception as e:  # boundary: if one endpoint fails, another may work
                problems.append(error_text(e))
                continue
            for tool in tools:
                is_for_us = (name_of(tool) == COMPUTER_TOOL) == is_computer
                if is_for_us and name_of(tool) not in self._owners:
                    self._owners[name_of(tool)] = connection
                    found.append(tool)
        if not self._connections:
            raise BackendError(f"instance {self._env.instance_id} has no tools: {'; '.join(problems)}")
        return found

    async def call_tool(self, name: str, arguments: JsonPayload) -> ToolAnswer:
        owner = self._owners.get(name)
        if owner is None:
            return ToolAnswer(None, f"there is no tool {name!r}; use {', '.join(self._owners)}")
        return await owner.call_tool(name, arguments)

    async def verify(self, attempt: FleetAttempt) -> FleetGrade:
        given: VerifierArguments = {} if attempt.answer is None else {"final_answer": attempt.answer}
        if TAKES_CONVERSATION.search(self._task.verifier_code or ""):
            given["conversation"] = list(attempt.conversation)
        grade = FleetGrade(score=None, error="the verifier did not run")
        for delay_s in (*VERIFY_DELAYS_S, None):
            grade = await self._verdict(given)
            if grade.score is not None or delay_s is None:
                break
            await asyncio.sleep(delay_s)
        return grade

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in self._connections), return_exceptions=True)
        self._connections.clear()
        env, self._env = self._env, None
        if env is not None:
            try:
                await env.close()
            except Exception as e:  # boundary: closing must not hide how the episode ended
                log.warning(
                    "instance %s could not be deleted and will expire by itself: %s", env.instance_id, error_text(e)
                )
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            await fleet._httpx_client.aclose()  # the SDK has no way of its own to close its connections

    async def _made(self) -> object:
        task, delays_s = self._task, iter(MAKE_DELAYS_S)
        while True:
            try:
                return await self._fleet.make(
                    _versioned(task.env_key, task.env_version),
                    data_key=None if task.data_key is None else _versioned(task.data_key, task.data_version),
                    env_variables=task.env_variables or None,
                    image_type="mcp" if task.task_modality == COMPUTER else None,
                    ttl_seconds=self._settings.ttl_seconds,
                )
            except Exception as e:  # boundary: the SDK's errors have no common class
                is_passing = any(word in str(e).lower() for word in PASSING)
                delay_s = next(delays_s, None) if is_passing else None
                if delay_s is None:
                    raise BackendError(f"Fleet could not make an instance of {task.env_key}: {error_text(e)}") from e
                await asyncio.sleep(delay_s)

    async def _verdict(self, given: VerifierArguments) -> FleetGrade:
        from fleet._async.tasks import Task  # pyright: ignore[reportMissingImports]

        task = self._task
        fleet_task = Task(
            key=task.task_key,
            prompt=task.prompt,
            env_id=task.env_key,
            version=task.env_version,
            data_id=task.data_key,
            data_version=task.data_version,
            verifier_func=task.verifier_code,
            verifier_id=task.raw.get("verifier_id"),
            verifier_sha=task.raw.get("verifier_sha"),
        )
        try:
            found = await fleet_task.verify_detailed_async(self._env, **given)
        except Exception as e:  # boundary: whatever fails there, the grade is unknown
            return FleetGrade(score=None, error=error_text(e))
        return judged(found)


def judged(found: Any) -> FleetGrade:
    """Converts the SDK's response to the same grade as that of a verifier that ran here."""
    error = found.error if isinstance(found.error, Mapping) else {"message": found.error}
    message = str(error.get("message") or "")
    success, result = found.success, None
    if success:
        try:
            result = score_of(found.result)
        except ValueError as e:
            success, message = False, str(e)
    elif error.get("type") == "AssertionError":
        success, result = True, 0.0
    else:
        message = message or "the verifier did not run"
    return FleetGrade.of(VerifierExecution(success=success, result=result, stdout=found.stdout or "", error=message))


def _versioned(key: str, version: str | None) -> str:
    return f"{key}:{version}" if version and ":" not in key else key
