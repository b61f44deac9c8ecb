"""OpenEnv's `/mcp` as a superset of MCP: standard clients connect, and sessions keep a world between calls.

A session is named by `params.session_id` (OpenEnv's clients), by the header `Mcp-Session-Id` (MCP's clients, which get
it on `initialize`), or is that of the WebSocket. Without one each call has a world of its own.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.datastructures import Headers

from palestra.environments.platform.api.mcp import message_answer
from palestra.environments.platform.api.openenv.sessions import OpenEnvSession, OpenEnvSessions, call_once
from palestra.environments.platform.app import TaskApp
from palestra.environments.platform.pool_records import LimitReached
from palestra.net.mcp import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    RpcError,
    RpcMessage,
    RpcResponse,
    ToolResult,
    error_answer,
    read_message,
    result_answer,
)
from palestra.util.json_types import JsonObject, JsonPayload

SERVER_ERROR = -32000
SESSION_HEADER = "mcp-session-id"
ALWAYS_200: dict[int, int] = {}
"""OpenEnv's clients look for errors in the body only."""


class SessionUnknown(Exception):
    """The header names an unknown session: MCP requires a 404, and the client starts again."""


class OpenEnvRpc:
    def __init__(self, sessions: OpenEnvSessions) -> None:
        self._sessions = sessions

    async def posted(
        self, app: TaskApp, team: str, headers: Headers, body: bytes
    ) -> tuple[RpcResponse, OpenEnvSession | None]:
        """Returns the answer, and the session that was made for an `initialize`. Raises SessionUnknown."""
        try:
            message = read_message(body)
        except RpcError as e:
            return error_answer(None, e, ALWAYS_200), None
        named = headers.get(SESSION_HEADER)
        session = None if named is None else self._sessions.find(named, app, team)
        if named is not None and session is None:
            raise SessionUnknown(named)
        if message["method"] != "initialize" or session is not None or "id" not in message:
            return await self._answered(app, team, headers, message, session), None
        try:
            made = await self._sessions.open(app, team)
        except LimitReached as e:
            return error_answer(message["id"], _full(e), ALWAYS_200), None
        answer = message_answer(app, made.call, headers, message, ALWAYS_200)
        if answer.status != 200:  # the other version of the protocol, which has no sessions
            self._sessions.close(made)
            return answer, None
        return answer, made

    async def sent(self, session: OpenEnvSession, body: bytes) -> bytes:
        """Answers a message over a WebSocket; empty if there is no answer."""
        try:
            message = read_message(body)
        except RpcError as e:
            return error_answer(None, e)[1]
        return (await self._answered(session.app, session.team, Headers(), message, session))[1]

    async def _answered(
        self, app: TaskApp, team: str, headers: Headers, message: RpcMessage, session: OpenEnvSession | None
    ) -> RpcResponse:
        params = message.get("params", {})
        try:
            match message["method"]:
                case "openenv/session/create" | "openenv/session/close" if "id" not in message:
                    raise RpcError(
                        INVALID_REQUEST, "sessions are opened and closed by requests, not notifications; send an id"
                    )
                case "openenv/session/create":
                    opened = session or await self._sessions.open(app, team)
                    return _result(message, {"session_id": opened.id})
                case "openenv/session/close":
                    return _result(message, self._closed(app, team, params, session))
                case _ if session is None and "session_id" in params:
                    session = self._found(app, team, params)
        except RpcError as e:
            return error_answer(message.get("id"), e, ALWAYS_200)
        except LimitReached as e:
            return error_answer(message.get("id"), _full(e), ALWAYS_200)
        if session is not None:
            return message_answer(app, session.call, headers, message, ALWAYS_200)

        def once(name: str, arguments: object) -> ToolResult:
            return call_once(app, name, arguments)

        if message["method"] == "tools/call":
            return await asyncio.to_thread(message_answer, app, once, headers, message, ALWAYS_200)
        return message_answer(app, once, headers, message, ALWAYS_200)

    def _found(self, app: TaskApp, team: str, params: JsonObject) -> OpenEnvSession:
        found = self._sessions.find(named := params.get("session_id"), app, team)
        if found is None:
            raise RpcError(INVALID_PARAMS, f"Unknown session_id: {str(named)[:64]!r}; openenv/session/create makes one")
        return found

    def _closed(self, app: TaskApp, team: str, params: JsonObject, own: OpenEnvSession | None) -> JsonPayload:
        found = self._found(app, team, params)
        if found is own:
            raise RpcError(INVALID_REQUEST, "this session belongs to the connection and ends with it")
        if found.is_attached:
            found.is_closing = True
            return {"session_id": found.id, "closed": False, "closing": True}
        self._sessions.close(found)
        return {"session_id": found.id, "closed": True}


def _result(message: RpcMessage, result: JsonPayload) -> RpcResponse:
    return result_answer(message.get("id", ""), msgspec.json.encode(result))


def _full(error: LimitReached) -> RpcError:
    return RpcError(SERVER_ERROR, str(error), {"active_sessions": error.count, "max_sessions": error.limit})
