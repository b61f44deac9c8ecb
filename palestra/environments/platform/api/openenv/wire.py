"""Messages of OpenEnv's clients: actions, frames, observations, schemas."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from typing import Any, NotRequired, TypedDict

import msgspec

from palestra.environments.platform.app import TaskApp
from palestra.environments.platform.errors import PlatformError
from palestra.net.mcp import ListedTool, ToolResult
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload

API_VERSION = "1.0.0"  # of OpenEnv's HTTP profile: `openenv validate` checks the first number
MAX_EPISODE_ID = 255
TOOL_ERRORS = {"unknown_tool": "tool_not_found", "bad_arguments": "invalid_args"}


class Observation(TypedDict):
    """An answer to a reset or a step."""

    observation: JsonPayload
    reward: float | None
    done: bool
    metadata: NotRequired[JsonPayload]


class OpenEnvState(TypedDict):
    """How far an episode is."""

    episode_id: str | None
    step_count: int
    task_key: str | None
    done: bool


class ErrorCode(StrEnum):
    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION = "VALIDATION_ERROR"
    EXECUTION = "EXECUTION_ERROR"
    CAPACITY = "CAPACITY_REACHED"
    FACTORY = "FACTORY_ERROR"
    SESSION = "SESSION_ERROR"


class ClientMistake(PlatformError):
    """The client sent something wrong, or at the wrong time. Its session continues."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


# What comes in


class ListTools(msgspec.Struct, tag_field="type", tag="list_tools", forbid_unknown_fields=True):
    metadata: JsonObject = {}


class CallTool(msgspec.Struct, tag_field="type", tag="call_tool", forbid_unknown_fields=True, kw_only=True):
    tool_name: str
    arguments: JsonObject = {}
    metadata: JsonObject = {}


class FinishAction(msgspec.Struct, tag_field="type", tag="finish", forbid_unknown_fields=True):
    answer: str | int | None = None
    metadata: JsonObject = {}


Action = ListTools | CallTool | FinishAction


class ResetRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Unknown names are refused: with a misspelt one, another task would be played than was meant."""

    seed: int | None = None
    episode_id: str | None = None
    task_key: str | None = None
    split: str | None = None
    index: int | None = None


class StepRequest(msgspec.Struct):
    action: JsonObject
    timeout_s: float | None = None
    """Accepted without effect: a call here takes less time than any client would wait."""


class SocketFrame(msgspec.Struct, forbid_unknown_fields=True):
    type: str = ""
    data: JsonObject = {}


def action_of(given: JsonMapping) -> Action:
    """Parses an action; a call may leave its type out, as in OpenEnv's own models."""
    return _read({"type": "call_tool", **given} if "tool_name" in given else given, Action, "action")


def reset_of(given: JsonPayload) -> ResetRequest:
    found = _read(given, ResetRequest, "reset")
    if (found.seed or 0) < 0 or (found.index or 0) < 0:
        raise ClientMistake(ErrorCode.VALIDATION, "reset: seed and index must be 0 or more")
    if len(found.episode_id or "") > MAX_EPISODE_ID:
        raise ClientMistake(ErrorCode.VALIDATION, f"reset: episode_id may have at most {MAX_EPISODE_ID} characters")
    return found


def step_of(given: JsonPayload) -> Action:
    found = _read(given, StepRequest, "step")
    if found.timeout_s is not None and not found.timeout_s > 0:
        raise ClientMistake(ErrorCode.VALIDATION, "step: timeout_s must be above 0")
    return action_of(found.action)


def frame_of(text: str | bytes) -> SocketFrame:
    try:
        given = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
        raise ClientMistake(ErrorCode.INVALID_JSON, f"Invalid JSON: {e}") from None
    return _read(given, SocketFrame, "message")


def _read(given: object, kind: object, what: str) -> Any:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as e:
        raise ClientMistake(ErrorCode.VALIDATION, f"{what}: {e}") from None


# What goes out


def observed(
    fields: JsonPayload, metadata: JsonPayload, reward: float | None = None, done: bool = False
) -> Observation:
    """Returns an observation. Metadata occurs twice, as with OpenEnv: typed clients read one place, generic ones the
    other."""
    answer: Observation = {"observation": {**fields, "metadata": metadata}, "reward": reward, "done": done}
    return {**answer, "metadata": metadata} if metadata else answer


def called(name: str, result: ToolResult) -> Observation:
    """Returns the tool's own text, byte for byte, also if it is an error."""
    error = None
    if result.is_error:
        answer = msgspec.json.decode(result.text)
        error = {"error_type": TOOL_ERRORS.get(answer["error"], "execution_error"), "message": answer["message"]}
    return observed({"tool_name": name, "result": msgspec.Raw(result.text.encode()), "error": error}, {})


def tools_shown(tools: Iterable[ListedTool]) -> list[JsonPayload]:
    return [{"name": t.name, "description": t.description, "input_schema": t.parameters} for t in tools]


def frame(kind: str, data: object) -> str:
    return msgspec.json.encode({"type": kind, "data": data}).decode()


def error_frame(code: ErrorCode, message: str, **more: object) -> str:
    return frame("error", {"message": message, "code": code, **more})


# What an app says of itself


def metadata(app: TaskApp) -> JsonPayload:
    return {
        "name": app.key,
        "description": app.description,
        "readme_content": None,
        "version": app.version,
        "author": None,
        "documentation_url": None,
    }


_METADATA = {"type": "object"}
_RESET_FIELDS = {"prompt": {"type": "string"}, "variables": {"type": "object"}, "metadata": _METADATA}
_STEP_FIELDS = {
    "tools": {"type": "array", "items": {"type": "object"}},
    "tool_name": {"type": "string"},
    "result": {},
    "error": {"type": ["object", "null"]},
    "answer": {"type": ["string", "null"]},
    "metadata": _METADATA,
}
_STATE_FIELDS = {
    "episode_id": {"type": ["string", "null"]},
    "step_count": {"type": "integer", "minimum": 0},
    "task_key": {"type": ["string", "null"]},
    "done": {"type": "boolean"},
}


@cache
def schemas() -> JsonPayload:
    return {
        "action": {"title": "Action", **msgspec.json.schema(Action)},
        "observation": {"title": "Observation", "type": "object", "properties": _STEP_FIELDS},
        "reset_observation": {"title": "ResetObservation", "type": "object", "properties": _RESET_FIELDS},
        "state": {"title": "State", "type": "object", "properties": _STATE_FIELDS},
    }


PATHS = {
    "/reset": ("post", "The first observation of a task; no state is kept for the next request."),
    "/step": ("post", "An action in a fresh world; no state is kept for the next request."),
    "/state": ("get", "The state of a fresh environment."),
    "/health": ("get", "Whether the server is up."),
    "/metadata": ("get", "Name and description of the environment."),
    "/schema": ("get", "JSON Schemas of actions, observations and state."),
    "/mcp": ("post", "MCP, and sessions by openenv/session/create and openenv/session/close."),
    "/list_environments": ("get", "The only environment of this server."),
    "/{env_name}/splits": ("get", "The splits: train and eval."),
    "/{env_name}/tasks": ("post", "The first tasks of each template of a split."),
    "/{env_name}/num_tasks": ("post", "The number of tasks in a split."),
    "/{env_name}/task": ("post", "One task by its index."),
    "/{env_name}/task_range": ("post", "Tasks from start up to stop."),
}


@cache
def openapi(app: str) -> JsonPayload:
    paths = {
        path: {method: {"summary": summary, "responses": {"200": {"description": "as asked"}}}}
        for path, (method, summary) in PATHS.items()
    }
    return {"openapi": "3.1.0", "info": {"title": f"OpenEnv: {app}", "version": API_VERSION}, "paths": paths}
