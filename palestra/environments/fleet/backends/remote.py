"""A platform elsewhere (`palestra platform serve`) over HTTP, without Fleet's SDK."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import msgspec

from palestra.environments.fleet.backend import (
    MAX_CHANGES,
    ChangedRow,
    FleetAttempt,
    FleetGrade,
    ToolAnswer,
    changed_rows,
)
from palestra.environments.fleet.errors import BackendError
from palestra.environments.fleet.mcp_client import answer_of
from palestra.environments.fleet.platform_tasks import platform_task
from palestra.environments.fleet.records import FleetTask
from palestra.environments.fleet.settings import FleetSettings
from palestra.environments.fleet.tool_schemas import openai_tool
from palestra.environments.guarded_calls import error_text
from palestra.environments.platform import PlatformError
from palestra.environments.platform.verifiers import VerifierExecution
from palestra.environments.platform.verifiers.source import verifier_source
from palestra.types.openai import ChatTool
from palestra.util.json_types import JsonObject, JsonPayload

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

BASE_URL = "FLEET_BASE_URL"
SHOWN = 300  # characters of an invalid answer in an error


class RemoteBackend:
    def __init__(self, task: FleetTask, settings: FleetSettings) -> None:
        base_url = settings.base_url or os.environ.get(BASE_URL)
        if not base_url:
            raise ValueError(f"the backend remote needs the platform's address: env_config.base_url or {BASE_URL}")
        self._task, self._settings = task, settings
        self._base_url = base_url.rstrip("/")
        self._http: httpx.AsyncClient | None = None
        self._instance: JsonObject | None = None

    async def create(self) -> None:
        try:
            import httpx
        except ModuleNotFoundError:
            raise BackendError("a remote platform needs httpx; to install: pip install httpx") from None
        settings, task = self._settings, self._task
        key = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        is_plain = self._base_url.startswith("http://")  # then no certificates are read, which takes long
        self._http = httpx.AsyncClient(headers=key, timeout=settings.request_timeout_s, verify=not is_plain)
        body = {
            "env_key": task.env_key,
            "env_version": task.env_version,
            "data_key": task.data_key,
            "env_variables": task.env_variables or None,
            "ttl_seconds": settings.ttl_seconds,
        }
        given = {name: value for name, value in body.items() if value is not None}
        self._instance = await self._sent("POST", f"{self._base_url}/v1/env/instances", given)
        for warning in self._instance.get("warnings", ()):
            log.warning("the platform at %s: %s", self._base_url, warning)

    async def list_tools(self) -> list[ChatTool]:
        found = await self._mcp("tools/list", {})
        return [openai_tool(tool["name"], tool.get("description"), tool.get("inputSchema")) for tool in found["tools"]]

    async def call_tool(self, name: str, arguments: JsonPayload) -> ToolAnswer:
        return answer_of(await self._mcp("tools/call", {"name": name, "arguments": arguments}))

    async def verify(self, attempt: FleetAttempt) -> FleetGrade:
        source = self._source()
        if source is None:
            return FleetGrade(score=None, error=f"task {self._task.task_key} has no verifier")
        body = {
            "function_code": source,
            "text_solution": attempt.answer,
            "conversation": list(attempt.conversation),
            "timeout": self._settings.verifier_timeout_s,
        }
        runner = self._opened["urls"]["manager"]["api"]
        found = await self._sent("POST", f"{runner}/execute_verifier_function", body, await self._runner_token())
        execution = {name: found[name] for name in ("success", "result", "stdout")}
        grade = FleetGrade.of(VerifierExecution(**execution, error=found["error"] or ""))
        return msgspec.structs.replace(grade, changes=await self._changes(runner))

    async def _changes(self, runner: str) -> list[ChangedRow]:
        """The rows that were changed, for people to read; none if the platform does not say, which is no reason to
        lose the grade."""
        try:
            found = await self._sent("POST", f"{runner}/diff/structured", {}, await self._runner_token())
            return changed_rows(found["diff"])[:MAX_CHANGES]
        except (BackendError, LookupError, TypeError, AttributeError) as e:
            log.warning("the platform at %s does not say what was changed: %s", self._base_url, error_text(e))
            return []

    async def close(self) -> None:
        http, instance, self._http = self._http, self._instance, None
        if http is None:
            return
        try:
            if instance is not None:
                await http.delete(f"{self._base_url}/v1/env/instances/{instance['instance_id']}")
        except Exception as e:  # boundary: closing must not hide how the episode ended
            log.warning(
                "an instance at %s could not be deleted and will expire by itself: %s", self._base_url, error_text(e)
            )
        finally:
            await http.aclose()

    @property
    def _opened(self) -> JsonObject:
        if self._instance is None:
            raise BackendError("there is no instance yet; create it first")
        return self._instance

    def _source(self) -> str | None:
        """Returns the verifier of the task, or that of the platform's task with this key."""
        if self._task.verifier_code:
            return self._task.verifier_code
        try:
            return verifier_source(platform_task(self._task.task_key))
        except PlatformError:
            return None

    async def _runner_token(self) -> dict[str, str]:
        """Returns the token: without a key, the runner can only be used with a token."""
        if self._settings.api_key:
            return {}
        found = await self._sent("GET", f"{self._base_url}/v1/runner-auth/token")
        return {"X-Runner-Token": found["token"]}

    async def _mcp(self, method: str, params: JsonPayload) -> JsonObject:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        found = await self._sent("POST", f"{self._opened['urls']['root']}mcp", message)
        if "result" not in found:
            raise BackendError(f"{method} was refused: {str(found.get('error'))[:SHOWN]}")
        return found["result"]

    async def _sent(
        self, method: str, url: str, body: JsonPayload | None = None, headers: dict[str, str] | None = None
    ) -> JsonObject:
        """Sends a request. Raises BackendError for anything but a valid answer."""
        assert self._http is not None
        try:
            answer = await self._http.request(method, url, json=body, headers=headers)
            found = answer.json() if answer.is_success else None
        except Exception as e:  # boundary: errors of the connection, or invalid JSON
            raise BackendError(f"the platform at {self._base_url} did not answer: {error_text(e)}") from e
        if not isinstance(found, dict):
            raise BackendError(f"the platform at {self._base_url} answered {answer.status_code}: {answer.text[:SHOWN]}")
        return found
